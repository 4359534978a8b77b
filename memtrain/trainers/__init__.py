"""Training: the work of every rank; torch is imported here only."""
