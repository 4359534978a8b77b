"""Frozen weights in 4 or 8 bits without bitsandbytes: stacks of experts, and linear maps on a CPU."""
