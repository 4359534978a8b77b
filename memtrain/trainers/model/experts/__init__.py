"""Mixtures of experts: routers, and the loss that evens the load of their experts."""
