"""The estimate: bytes by owner and phase, and the time of a step."""
