"""Words: what the user types and reads; starts processes."""
