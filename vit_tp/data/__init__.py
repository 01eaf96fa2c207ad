"""Samples to batches: which sample is read when, by whom, and what it looks like."""
