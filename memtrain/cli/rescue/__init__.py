"""A run that died for want of memory: its traceback, its plan as it was, and what makes it fit."""
