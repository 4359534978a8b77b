"""Completions written by the policy: groups of them for a prompt, token ids in and out."""
