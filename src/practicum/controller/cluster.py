"""Ray: started on this machine for the run, or joined by address; its nodes, and what fits on them."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node

from practicum.controller.host import host_address
from practicum.controller.watchdog import watch_over_children
from practicum.errors import ResourceError

_started_here: set[str | None] = set()
_SHOWN = 16  # nodes in a message


@contextmanager
def ray_cluster(address: str | None = None, *, show_output: bool = False) -> Iterator[None]:
    """Connect to Ray for a `with` block: join it at `address` or RAY_ADDRESS, or else start it on this machine.

    Processes started here end with the block; a Ray that was already up stays up. `show_output` brings what workers
    print to the driver's output; otherwise it is in Ray's log files.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _refuse_if_nobody_answers(address)
        _agree_on_token(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The first failure of a call is raised to the caller; the same failure on other ranks need not be printed as well.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # An actor without an accelerator keeps the driver's view of the devices instead of a changed environment.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # What a worker started ends with it, also when it is killed.
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "1")
    with ExitStack() as stack:
        all_started = None if address else stack.enter_context(watch_over_children())
        stack.callback(ray.shutdown)
        try:
            with warnings.catch_warnings(), _own_signal_handlers():
                warnings.simplefilter("ignore")
                ray.init(
                    address=address or "local",
                    include_dashboard=None if address else False,
                    logging_level=logging.ERROR,
                    log_to_driver=show_output,
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"join the Ray cluster at {address!r}" if address else "start Ray on this machine"
            token = ""
            if address:
                token = (
                    " If it asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the one it started with."
                )
            raise ResourceError(f"could not {where}: {error}.{token}") from error
        if all_started:
            _started_here.add(cluster_id())
            all_started()
        yield


def cluster_id() -> str | None:
    """Return the id of this driver's connection to a cluster; each connection has another."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_job_id()}"


def ends_with_driver() -> bool:
    """Return whether this driver started its cluster itself."""
    return cluster_id() in _started_here


def is_lost() -> bool:
    """Return whether Ray, started by this driver, has lost a process that it cannot do without."""
    return bool(_lost_processes())


def check_not_lost(what: str) -> None:
    """Raise if Ray, started by this driver, cannot go on. Ray itself says so after a minute at best: what it has
    started works on for a while without it."""
    if lost := _lost_processes():
        logs = ray._private.worker._global_node.get_logs_dir_path()  # type: ignore[attr-defined]
        raise ResourceError(
            f"{what} was given up: the Ray that was started on this machine for the run has lost its "
            f"{' and '.join(lost)}, which was killed or ran out of memory. Look for the reason in its logs in {logs} "
            "and in those of the system (dmesg), then start the run again; resume=auto continues from the newest "
            "checkpoint."
        )


def _lost_processes() -> list[str]:
    node = ray._private.worker._global_node
    if node is None or not ends_with_driver():
        return []
    return [kind for kind, _ in node.dead_processes() if kind in ("raylet", "gcs_server")]


def starts_here(address: str | None) -> bool:
    """Return whether `ray_cluster(address)` starts a cluster on this machine, or this driver already did."""
    if address:
        return False
    return ends_with_driver() if ray.is_initialized() else "RAY_ADDRESS" not in os.environ


def ensure_ray() -> None:
    """Enter `ray_cluster()` for the rest of this process, if it has no Ray yet."""
    if not ray.is_initialized():
        for_life = ExitStack()
        for_life.enter_context(ray_cluster())
        atexit.register(for_life.close)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Restore the driver's handler of SIGTERM: with Ray's own, the signal ends in a crash dump.

    A first Ctrl-C takes effect at the end of the block: in the middle of Ray's start, it would end in a crash as well.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    interrupts: list[int] = []

    def interrupt_later(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(number, handlers[signal.SIGINT])

    signal.signal(signal.SIGINT, interrupt_later)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


def _agree_on_token(address: str) -> None:
    """Show a token if the cluster asks for one; else a token is refused: the cluster's processes have none to show to
    this driver, and Ray would only say that its actors have died."""
    asks, mode = _asks_for_token(address), os.environ.get("RAY_AUTH_MODE", "").lower()
    if asks is False and mode == "token":
        raise ResourceError(
            f"could not join the Ray cluster at {address!r}: RAY_AUTH_MODE=token here, and that cluster was started "
            "without tokens. Set RAY_AUTH_MODE=disabled, or start the cluster with RAY_AUTH_MODE=token and the same "
            "RAY_AUTH_TOKEN on every machine."
        )
    if asks and mode == "disabled":
        raise ResourceError(
            f"could not join the Ray cluster at {address!r}: it asks for a token, and RAY_AUTH_MODE=disabled here. Set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the one it started with."
        )
    if asks is not False:
        _show_own_token(address)


def _asks_for_token(address: str) -> bool | None:
    """Return whether a cluster asks for a token; None if that is not known."""
    if not address.rpartition(":")[2].isdigit() or "/" in address:
        return None
    try:
        import grpc
    except ImportError:
        return None
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=5.0)
        except grpc.RpcError as error:
            return True if error.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return False


def _show_own_token(address: str) -> None:
    """Let Ray show the token that a cluster started on this machine left here; another machine is not shown it."""
    if address.rpartition(":")[0] not in ("127.0.0.1", "localhost", host_address()):
        return
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # Ray before 2.60 asks for none
        return
    logging.getLogger("ray").setLevel(logging.ERROR)  # it would warn that it does so
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _refuse_if_nobody_answers(address: str, timeout_s: float = 10.0) -> None:
    """Try to connect once: Ray itself retries for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # `auto` and client addresses are Ray's to resolve
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise ResourceError(
            f"could not join the Ray cluster at {address!r}: {error}. Check controller.address, "
            "or leave it out to start Ray on this machine."
        ) from error


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def capacity(self, bundle: Mapping[str, float]) -> int:
        """Return how many processes it could hold if it were empty."""
        return min(int(self.total.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items() if amount)


def living_nodes() -> list[Node]:
    """Return the nodes in the order of their addresses, which stays the same when a job starts again."""
    free = available_resources_per_node()
    nodes = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def spread_over_nodes(num_processes: int, bundle: Mapping[str, float]) -> list[int]:
    """Return numbers of processes, one for each node, that fill as few nodes as possible.

    If the cluster cannot hold them all, the last number has the rest too, so that reserving them fails.
    """
    counts = []
    for capacity in sorted((node.capacity(bundle) for node in living_nodes()), reverse=True):
        if num_processes and capacity:
            counts.append(min(capacity, num_processes))
            num_processes -= counts[-1]
    return [*counts[:-1], counts[-1] + num_processes] if counts else [num_processes]


def could_hold(process_on_nodes: Sequence[int], bundle: Mapping[str, float]) -> bool:
    """Return False if the living nodes are certainly too small, even if they were empty."""
    rooms = [node.capacity(bundle) for node in living_nodes()]
    return max(process_on_nodes) <= max(rooms) and sum(process_on_nodes) <= sum(rooms)


def describe_nodes(resources: Iterable[str]) -> str:
    """Say for an error message what each node has and how much of it is free."""
    nodes, names = living_nodes(), list(resources)
    rows = [f"{node.address} ({', '.join(_free_of(node, name) for name in names)})" for node in nodes[:_SHOWN]]
    more = f" and {len(nodes) - _SHOWN} more nodes" if len(nodes) > _SHOWN else ""
    types = sorted({n.partition(":")[2] for node in nodes for n in node.total if n.startswith("accelerator_type:")})
    accelerators = f"; accelerator types: {', '.join(types) or 'none'}" if "GPU" in names else ""
    return f"the cluster has {'; '.join(rows)}{more}{accelerators}"


def _free_of(node: Node, name: str) -> str:
    return f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free"
