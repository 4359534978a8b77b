"""Strategies for activations and the loss."""
