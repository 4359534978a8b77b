"""Methods: a page for each, with its paper and its differences from the loop."""
