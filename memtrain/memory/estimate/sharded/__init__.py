"""Bytes and traffic of FSDP2 and ZeRO."""
