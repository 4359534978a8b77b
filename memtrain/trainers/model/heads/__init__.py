"""Heads: language model, reward, value."""
