"""Configurations of other trainers -> recipes: each tool's keys in one table, as keys of TRL."""
