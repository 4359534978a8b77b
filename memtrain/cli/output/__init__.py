"""Words on the terminal and in the length report."""
