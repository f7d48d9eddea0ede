"""Contestants that run in our own environment: ours, and what needs nothing more than ours does."""
