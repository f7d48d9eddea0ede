"""Processes that may be lost: a job that hangs, crashes or eats memory costs its own process and nothing else."""

from practicum.processes.pool import JobFailed, ProcessPool
from practicum.processes.work import Limits, Work

__all__ = ["JobFailed", "Limits", "ProcessPool", "Work"]
