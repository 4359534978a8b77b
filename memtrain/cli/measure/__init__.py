"""Measuring from the command line: bench, its variants, verify."""
