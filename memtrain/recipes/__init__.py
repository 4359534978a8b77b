"""What is asked: strict recipes, read from YAML; no torch."""
