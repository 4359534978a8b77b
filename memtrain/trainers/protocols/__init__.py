"""Protocols of a method, a feed and an event."""
