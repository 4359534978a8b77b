"""Reading: from YAML text and overrides to a recipe, with file:line in every error."""
