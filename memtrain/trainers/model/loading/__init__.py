"""Loading models: weights, adapters, quantization, kernels; saving them."""
