"""A run that ran out of memory: its traceback, its plan, and changes that make it fit."""
