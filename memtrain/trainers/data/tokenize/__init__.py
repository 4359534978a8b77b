"""Tokenizing: chat templates, rendering and encoding."""
