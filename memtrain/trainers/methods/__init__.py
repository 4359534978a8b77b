"""Methods: one page each, with its paper and what differs from the loop."""
