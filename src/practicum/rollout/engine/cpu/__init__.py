"""The native engine on a CPU: transformers' modules, kernels in C, fused decoding."""
