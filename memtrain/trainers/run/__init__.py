"""What is left of a run: folder, checkpoints, metrics, report."""
