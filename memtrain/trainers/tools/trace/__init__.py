"""The trace: a training step on tensors without data, every allocation by phase and owner."""
