"""Losses of policies: ratios, surrogates, importance correction, value."""
