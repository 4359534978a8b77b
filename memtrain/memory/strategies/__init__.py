"""Memory strategies: a page for each, with price, refusals and source."""
