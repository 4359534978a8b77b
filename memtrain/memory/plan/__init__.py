"""The plan: settings, lengths, units, and its JSON form."""
