"""The single controller: pools of resources, packed worker classes, and groups that one call drives. It knows no RL."""

from practicum.controller.backend import Controller, num_replicas, open_controller, places_beside
from practicum.controller.cluster import ray_cluster, starts_here
from practicum.controller.group import GroupFuture, WorkerGroup
from practicum.controller.local import LocalWorkerGroup
from practicum.controller.pool import RayResourcePool
from practicum.controller.ray_group import RayWorkerGroup
from practicum.controller.worker import Coordinates, FusedWorker, Mesh, RayClassWithInitArgs, Worker, WorkerContext

__all__ = [
    "Controller",
    "Coordinates",
    "FusedWorker",
    "GroupFuture",
    "LocalWorkerGroup",
    "Mesh",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "num_replicas",
    "open_controller",
    "places_beside",
    "ray_cluster",
    "starts_here",
]
