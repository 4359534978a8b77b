"""Shapes of models, read from their configurations."""
