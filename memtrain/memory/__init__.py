"""Planning: arithmetic, rules and search over memory strategies; no torch at import."""
