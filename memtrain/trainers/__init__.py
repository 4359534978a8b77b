"""The work: what every rank does; torch lives here."""
