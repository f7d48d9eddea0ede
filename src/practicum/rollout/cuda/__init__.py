"""The native engine's way on a CUDA device."""
