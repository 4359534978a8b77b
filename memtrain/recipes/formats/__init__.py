"""Formats: a row of the user's file to a typed example, a file each."""
