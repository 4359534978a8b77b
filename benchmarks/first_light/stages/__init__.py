"""What is measured, a file a question; each function is one stage."""
