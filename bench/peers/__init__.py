"""What we measure against. Each runs in an environment of its own, made by the script of its name."""
