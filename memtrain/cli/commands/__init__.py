"""Commands: each in a file; heavy imports stay inside the functions."""
