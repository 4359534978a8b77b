"""Measuring memory: live tensors, phases, the peak of an allocator."""
