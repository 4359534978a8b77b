"""Strategies for rows and batches."""
