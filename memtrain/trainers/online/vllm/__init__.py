"""vLLM as the sampler: its process, its server, the sync of weights."""
