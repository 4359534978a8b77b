"""Memory strategies: one page each, with its price, its refusals and its source."""
