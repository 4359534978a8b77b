"""The explanation of a plan: tables, reasons, and suggestions where nothing fits."""
