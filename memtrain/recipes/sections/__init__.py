"""Sections of a recipe: one file each."""
