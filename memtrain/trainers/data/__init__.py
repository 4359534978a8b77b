"""Data: from the user's files to batches of tokens."""
