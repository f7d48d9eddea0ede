"""Processes that may be lost: a job that hangs, crashes or eats memory costs its own process and nothing else."""

from practicum.reward.processes.pool import JobFailed, ProcessPool
from practicum.reward.processes.work import Work

__all__ = ["JobFailed", "ProcessPool", "Work"]
