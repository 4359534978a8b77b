"""Configurations of TRL -> recipes: what each key becomes, and what has no counterpart."""
