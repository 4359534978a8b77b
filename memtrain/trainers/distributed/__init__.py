"""Engines of several processes: DDP, FSDP2, ZeRO, context parallelism."""
