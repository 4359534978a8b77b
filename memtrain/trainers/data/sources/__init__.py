"""Sources: files and datasets, read row by row."""
