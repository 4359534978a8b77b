"""A training step on tensors without data: every allocation of it, by phase and owner."""
