"""Launching: one process, accelerate, SLURM; what a run prints while it goes on."""
