"""The planner: the search for the fastest plan that fits."""
