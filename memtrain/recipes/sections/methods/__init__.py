"""Sections of the methods: one file a family."""
