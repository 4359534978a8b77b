"""The report of a run and its model card."""
