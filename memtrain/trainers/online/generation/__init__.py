"""Generation by the policy itself: samplers, keys and values, token choice."""
