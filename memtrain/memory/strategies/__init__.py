"""Memory strategies: when each applies, what it saves, what it costs, what it refuses."""
