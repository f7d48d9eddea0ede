"""Runs programs nobody has read: in a box without network, files, privileges or a way out."""

from practicum.reward.sandbox.box import Limits, Outcome, Sandbox, isolation_problem

__all__ = ["Limits", "Outcome", "Sandbox", "isolation_problem"]
