"""Benchmarks: Practicum and what people use today, on the same work, in turns. `python -m bench NAME`."""
