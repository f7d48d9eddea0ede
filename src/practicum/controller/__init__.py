"""The single controller: pools of resources, packed worker classes, and groups that one call drives. Knows no RL."""

from practicum.controller.backend import Controller, open_controller
from practicum.controller.cluster import ray_cluster
from practicum.controller.group import GroupFuture, WorkerGroup, split_evenly
from practicum.controller.local import LocalWorkerGroup
from practicum.controller.pool import RayResourcePool
from practicum.controller.ray_group import RayWorkerGroup
from practicum.controller.worker import FusedWorker, RayClassWithInitArgs, Worker, WorkerContext

__all__ = [
    "Controller",
    "FusedWorker",
    "GroupFuture",
    "LocalWorkerGroup",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "open_controller",
    "ray_cluster",
    "split_evenly",
]
