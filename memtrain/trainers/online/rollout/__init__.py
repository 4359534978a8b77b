"""Rollouts: completions scored, weighted and dealt into batches."""
