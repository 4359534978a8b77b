"""Parts of a run that wait for their room."""
