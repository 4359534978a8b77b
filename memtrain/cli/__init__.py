"""The command line: arguments, output, and the start of processes."""
