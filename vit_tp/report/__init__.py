"""What a person sees of a run: metrics, progress, a plot, closing lines."""
