"""Devices, their memory and rates, and measured peaks."""
