"""Strategies for weights, adapters and references."""
