"""The written reference: JSON Schema, commented YAML, recipes to start from."""
