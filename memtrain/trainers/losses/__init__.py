"""Losses: pure functions of tensors, each with its source."""
