"""Pages of HTML that need nothing beside themselves, and the charts on them."""
