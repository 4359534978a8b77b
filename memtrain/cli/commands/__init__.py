"""Commands: one verb a file; heavy imports stay inside the functions."""
