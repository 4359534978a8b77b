"""Losses of preferences: pairs, single answers, reward models."""
