"""The two-minute demonstration: a tiny mixture of experts learns to add."""
