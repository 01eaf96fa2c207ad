"""What survives the run."""
