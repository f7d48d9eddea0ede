"""Trainer to engine: versions and the ways weights travel."""

from practicum.weights.update import WeightSource, WeightUpdate

__all__ = ["WeightSource", "WeightUpdate"]
