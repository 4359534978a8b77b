"""What judges completions: functions of the user's, and built-in ones."""
