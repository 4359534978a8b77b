"""Configurations of other trainers -> recipes: each tool's keys in one table, said in TRL's words."""
