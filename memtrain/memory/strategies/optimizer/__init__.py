"""Strategies for optimizer states and gradients."""
