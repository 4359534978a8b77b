"""Online methods: generation, rewards, rollouts, vLLM."""
