"""The engine `vllm`."""
