"""Optimizers: masters, offloading, steps in the backward pass, schedules."""
