"""Rules that settle a recipe before the search: base settings, engines, attention, batches, refusals."""
