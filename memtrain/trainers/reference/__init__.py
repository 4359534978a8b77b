"""Reference models: their forms and their log-probs."""
