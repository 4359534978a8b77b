"""Rewards: functions of the user, built-in ones, reward models and judges."""
