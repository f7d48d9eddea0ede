"""The engines behind a completions server: what they share."""
