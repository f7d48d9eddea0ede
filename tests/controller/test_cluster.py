"""Ray, started here or joined, and its nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from practicum.controller.cluster import could_hold, describe_nodes, living_nodes, spread_over_nodes

DRIVER = """
import time
from practicum.controller import ray_cluster
with ray_cluster():
    print("up", flush=True)
    time.sleep(60)
"""


def start_driver(env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)


def has_workers(driver: subprocess.Popen[bytes]) -> bool:
    with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
        started = psutil.Process(driver.pid).children(recursive=True)
        return any("default_worker" in " ".join(process.cmdline()) for process in started)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_survives_the_driver(how: signal.Signals) -> None:
    driver = start_driver()
    assert driver.stdout is not None and driver.stdout.readline() == b"up\n"
    started = psutil.Process(driver.pid).children(recursive=True)
    assert started
    driver.send_signal(how)
    driver.wait(30)
    assert not psutil.wait_procs(started, timeout=60)[1]


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.2, 1.5])
def test_nor_a_driver_killed_while_ray_starts(delay_s: float) -> None:
    driver = start_driver()
    deadline = time.monotonic() + 30
    while len(psutil.Process(driver.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)  # the watchdog, then the first of Ray's processes
    time.sleep(delay_s)
    started = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait(30)
    assert not psutil.wait_procs(started, timeout=60)[1]


@pytest.mark.slow
def test_an_interrupt_while_ray_starts_ends_the_driver_without_a_crash(tmp_path: Path) -> None:
    slow_workers = "import sys, time\nif 'default_worker' in ''.join(sys.orig_argv): time.sleep(10)"
    (tmp_path / "sitecustomize.py").write_text(slow_workers)  # the start of Ray ends with that of its first worker
    path = os.pathsep.join([str(tmp_path), *sys.path])
    driver = start_driver({**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 60
    while not has_workers(driver):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1.0)
    driver.send_signal(signal.SIGINT)
    assert driver.communicate(timeout=60)[0] == b""
    assert driver.returncode == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_a_pool_without_ray_starts_one_that_ends_with_the_program(ending: str) -> None:
    code = f"""
import os, psutil
from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
class Counter(Worker):
    def add(self, values): return sum(values) + self.rank
with RayResourcePool([2], resources_per_process={{"CPU": 0.5}}) as pool:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter))
    print(group.execute_all(Counter.add, [1, 2, 3]))
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    {ending}
group.shutdown()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == (-9 if ending else 0), run.stderr
    replies, pids = run.stdout.splitlines()
    assert replies == "[6, 7]"
    left = [psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))]
    assert not psutil.wait_procs(left, timeout=60)[1]


@pytest.mark.slow
def test_calls_after_the_end_of_ray_say_so_and_start_no_other() -> None:
    code = """
import ray
from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, ray_cluster
from practicum.errors import WorkerDied
class Counter(Worker):
    def add(self, values): return sum(values) + self.rank
def told(call):
    try: call()
    except WorkerDied as error: print(error)
with ray_cluster(), RayResourcePool([1]) as pool:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter))
    future = group.execute_all_async(Counter.add, [1])
told(future.result)
told(lambda: group.execute_all(Counter.add, [1]))
group.shutdown()
pool.release()
print(ray.is_initialized())
with ray_cluster():
    told(future.result)
    told(lambda: group.execute_all(Counter.add, [1]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    asked_late, called_late, is_up, asked_again, called_again = run.stdout.splitlines()
    assert asked_late == asked_again == "group 'Counter': its Ray has ended, and Counter.add with it"
    assert called_late == "group 'Counter' has ended with its Ray"
    assert is_up == "False"
    assert called_again == "group 'Counter' has been shut down, or is just being restarted"


LOST = """
import sys, psutil
from practicum.controller import RayClassWithInitArgs, Worker, open_controller
from practicum.controller.loop import run_sync
from practicum.errors import ResourceError
class Counter(Worker):
    def add(self, values): return sum(values) + self.rank
def told(call):
    try:
        while True: call()
    except ResourceError as error: print(error, flush=True)
with open_controller("ray", num_workers=1, use_gpu=False, max_colocate_count=2) as controller:
    group = run_sync(controller.group(RayClassWithInitArgs(Counter), name="first"))
    (lost,) = [child for child in psutil.Process().children(recursive=True) if child.name() == sys.argv[1]]
    lost.kill()
    told(lambda: group.execute_all(Counter.add, [1]))
    told(lambda: run_sync(controller.group(RayClassWithInitArgs(Counter), name="second")))

    async def add(): return await group.execute_all_async(Counter.add, [1])
    told(lambda: run_sync(add()))
print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_a_ray_that_lost_a_process_ends_what_waits_for_it(process: str) -> None:
    run = subprocess.run([sys.executable, "-c", LOST, process], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    called, started, awaited = [line for line in lines if "was given up" in line]
    why = f" was given up: the Ray that was started on this machine for the run has lost its {process}, which was"
    assert called.startswith("group 'first': Counter.add" + why) and awaited == called
    assert started.startswith("the start of processes" + why)
    assert "resume=auto continues from the newest checkpoint" in called and lines[-1] == "ended"


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_named() -> None:
    joining = "from practicum.controller import ray_cluster\nwith ray_cluster('127.0.0.1:1'): pass"
    run = subprocess.run([sys.executable, "-c", joining], capture_output=True, text=True, timeout=120)
    assert "ResourceError: could not join the Ray cluster at '127.0.0.1:1'" in run.stderr


HEAD = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024})
print(cluster.address, flush=True)
input()
cluster.shutdown()
"""
JOINED = """
import sys
from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, ray_cluster
class Counter(Worker):
    def add(self, values): return sum(values) + self.rank
with ray_cluster(sys.argv[1]), RayResourcePool([1]) as pool:
    print(RayWorkerGroup(pool, RayClassWithInitArgs(Counter)).execute_all(Counter.add, [1, 2]))
"""


@pytest.mark.slow
def test_a_cluster_without_tokens_is_shown_none(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a" * 64)  # of another cluster of this machine
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**plain, "RAY_AUTH_MODE": "disabled"},
    )
    try:
        assert head.stdout is not None
        address = next(line for line in head.stdout if ":" in line).split()[-1]

        def join(**env: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", JOINED, address]
            return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**plain, **env})

        found = join(HOME=str(tmp_path))
        assert found.stdout == "[3]\n", found.stderr
        refused = join(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="b" * 64).stderr.splitlines()[-1]
        assert "RAY_AUTH_MODE=token here, and that cluster was started without tokens" in refused
    finally:
        head.communicate("\n", timeout=60)


def test_processes_fill_as_few_nodes_as_they_can(ray_session: None) -> None:
    (node,) = living_nodes()
    cpus = int(ray.cluster_resources()["CPU"])
    assert spread_over_nodes(1, {"CPU": 1.0}) == [1]
    assert spread_over_nodes(2 * cpus, {"CPU": 0.5}) == [2 * cpus]
    assert spread_over_nodes(cpus + 3, {"CPU": 1.0}) == [cpus + 3]  # too many: the pool will say so
    assert spread_over_nodes(3, {"GPU": 1000.0}) == [3]
    assert node.capacity({"CPU": 1.0, "GPU": 0.0}) == cpus


def test_entries_of_a_pool_may_share_a_node(ray_session: None) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    assert could_hold([1] * cpus, {"CPU": 1.0})
    assert not could_hold([1] * (cpus + 1), {"CPU": 1.0})
    assert not could_hold([cpus + 1], {"CPU": 1.0})


def test_what_a_node_has_is_told_resource_by_resource(ray_session: None) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    assert f" of {cpus} CPU free, 0 of 0 nvme free)" in describe_nodes(["CPU", "nvme"])
