"""Protocols: what a method, a feed and an event are."""
