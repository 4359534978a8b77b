"""The run folder: metrics, trackers, progress, report."""
