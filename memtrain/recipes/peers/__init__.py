"""Words of other trainers: a table for each, a row for each key, and the hints that are made of the rows."""
