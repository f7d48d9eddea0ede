"""Engines that are servers: vLLM, and any other that speaks the completions protocol."""
