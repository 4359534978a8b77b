"""Formats: one row of the user's file to one typed example, one file a format."""
