"""Launching: in this process, through accelerate, on SLURM."""
