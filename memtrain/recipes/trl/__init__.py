"""Configurations of TRL -> recipes: the counterpart of each key, and keys without."""
