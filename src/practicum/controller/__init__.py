"""The single controller: pools of resources, packed worker classes, and groups that one call drives. Knows no RL."""

from practicum.controller.backend import Controller, open_controller
from practicum.controller.batch import join_batches, split_batch
from practicum.controller.cluster import ray_cluster, starts_here
from practicum.controller.future import GroupFuture, wait_any
from practicum.controller.group import WorkerGroup
from practicum.controller.local import LocalWorkerGroup
from practicum.controller.mesh import Coordinates, Mesh
from practicum.controller.packed import FusedWorker, RayClassWithInitArgs
from practicum.controller.pool import RayResourcePool
from practicum.controller.ray_group import RayWorkerGroup
from practicum.controller.replicas import num_replicas, places_beside, side_by_side
from practicum.controller.worker import Worker, WorkerContext

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
    "join_batches",
    "num_replicas",
    "open_controller",
    "places_beside",
    "ray_cluster",
    "side_by_side",
    "split_batch",
    "starts_here",
    "wait_any",
]
