"""Building: model, optimizer, engine and method put together for a step."""
