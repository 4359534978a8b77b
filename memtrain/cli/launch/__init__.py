"""Launching: one process, accelerate, SLURM; the summary of a run on the terminal."""
