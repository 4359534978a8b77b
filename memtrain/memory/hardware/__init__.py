"""Devices, what they can hold and do, and the peaks they have shown."""
