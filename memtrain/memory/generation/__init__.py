"""The memory of generation: the native sampler, vLLM, gathered weights."""
