"""Several turns: conversations with tools or an environment, over any engine."""
