"""Detached groups, seen from several drivers of one cluster that outlives them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

WORKER = """
import ray, sys
from practicum.controller import Mesh, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, ray_cluster
from practicum.errors import CallError, ResourceError, WorkerDied

class Diary(Worker):
    def __init__(self): self.lines = []
    def write(self, line): self.lines.append(line); return self.lines
    def pid(self): import os; return os.getpid()
class Other(Worker): pass

def refused(call, kind):
    try: call()
    except kind as error: print(error)
    else: raise SystemExit("not refused")
"""
START = """
with ray_cluster({address!r}):
    pool = RayResourcePool([2], resources_per_process={{"CPU": 0.5}}, detached=True)
    packed, meshes = RayClassWithInitArgs(Diary), {{"pair": Mesh(1, 2)}}
    group = RayWorkerGroup(pool, packed, name="diaries", meshes=meshes, detached=True)
    group.execute_all(Diary.write, "first")
    refused(lambda: RayWorkerGroup(pool, packed, name="diaries", detached=True), ResourceError)
    with RayResourcePool([1], resources_per_process={{"CPU": 0.5}}) as mortal:
        refused(lambda: RayWorkerGroup(mortal, packed, name="x", detached=True), CallError)
    print(*group.execute_all(Diary.pid))
"""
GO_ON = """
with ray_cluster({address!r}):
    group = RayWorkerGroup.attach("diaries", Diary)
    assert group.execute_all(Diary.write, "second") == [["first", "second"]] * 2, "state is kept"
    assert group.mesh("pair").execute_all(Diary.write, "third") == [["first", "second", "third"]]
    refused(lambda: RayWorkerGroup.attach("diaries", Other), CallError)
    refused(lambda: RayWorkerGroup.attach("dairies", Diary), ResourceError)
    left_behind = RayWorkerGroup.attach("diaries", Diary)
    group.restart()
    refused(left_behind.shutdown, WorkerDied)
    assert RayWorkerGroup.attach("diaries", Diary).execute_all(Diary.write, "new") == [["new"]] * 2
    print(*group.execute_all(Diary.pid))
"""
END = """
with ray_cluster({address!r}):
    group = RayWorkerGroup.attach("diaries", Diary)
    assert group.execute_rank_zero(Diary.write, "newer") == ["new", "newer"]
    group.shutdown()
    group.pool.release()
    refused(lambda: RayWorkerGroup.attach("diaries", Diary), ResourceError)
    with RayResourcePool([2], resources_per_process={{"CPU": 0.5}}, timeout_s=30): pass
"""


@pytest.fixture(scope="module")
def cluster_address() -> Iterator[str]:
    """A cluster that does not belong to any driver."""
    code = (
        "import ray, sys\nfrom practicum.controller import ray_cluster\nwith ray_cluster():\n"
        "    print(ray.get_runtime_context().gcs_address, flush=True)\n    sys.stdin.read()"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdin is not None and host.stdout is not None
    try:
        yield host.stdout.readline().strip()
    finally:
        host.stdin.close()
        host.wait(60)


def drive(code: str, address: str, kill: bool = False) -> list[str]:
    script = WORKER + code.format(address=address)
    script += "\n    import os; sys.stdout.flush(); os.kill(os.getpid(), 9)\n" if kill else ""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == (-9 if kill else 0), run.stderr
    return run.stdout.splitlines()


@pytest.mark.slow
def test_a_detached_group_outlives_its_driver_and_is_found_by_name(cluster_address: str) -> None:
    runs_already, needs_pool, pids = drive(START, cluster_address, kill=True)
    assert runs_already.startswith("a detached group 'diaries' runs already")
    assert needs_pool.startswith("detached group 'x' needs a whole detached pool")
    first = [psutil.Process(int(pid)) for pid in pids.split()]
    assert all(process.is_running() for process in first)
    wrong_class, wrong_name, stale, pids = drive(GO_ON, cluster_address)
    assert wrong_class == "group 'diaries' is of <class '__main__.Diary'>, not <class '__main__.Other'>"
    assert wrong_name == "no detached group 'dairies' runs in this cluster; those written down: diaries"
    assert stale == "detached group 'diaries' was started anew by another driver: attach to it again"
    assert not psutil.wait_procs(first, timeout=10)[1]
    second = [psutil.Process(int(pid)) for pid in pids.split()]
    (gone,) = drive(END, cluster_address)
    assert "those written down: none" in gone
    assert not psutil.wait_procs(second, timeout=10)[1]


CUT_OFF = """
class Slow(Diary):
    def __init__(self):
        import time; time.sleep(60)
with ray_cluster({address!r}):
    import os, threading
    pool = RayResourcePool([2], resources_per_process={{"CPU": 0.5}}, detached=True)
    threading.Timer(3, lambda: os.kill(os.getpid(), 9)).start()
    RayWorkerGroup(pool, RayClassWithInitArgs(Slow), name="diaries", detached=True, start_timeout_s=5)
"""
AFTER_IT = """
with ray_cluster({address!r}):
    import time
    refused(lambda: RayWorkerGroup.attach("diaries", Diary), ResourceError)
    time.sleep(3)
    pool = RayResourcePool([2], resources_per_process={{"CPU": 0.5}}, detached=True, timeout_s=60)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Diary), name="diaries", detached=True)
    assert group.execute_all(Diary.write, "new") == [["new"]] * 2
    group.shutdown()
    pool.release()
    print(int(ray.available_resources()["CPU"] * 10) == int(ray.cluster_resources()["CPU"] * 10))
"""


@pytest.mark.slow
def test_what_a_driver_killed_during_the_start_left_is_cleared_away(cluster_address: str) -> None:
    assert drive(CUT_OFF, cluster_address, kill=True) == []
    not_ready, _ = drive(AFTER_IT, cluster_address)
    assert not_ready == "detached group 'diaries' is not ready: its start has not ended, or was cut off"


@pytest.mark.slow
def test_workers_of_a_killed_driver_end_on_a_cluster_that_stays(cluster_address: str) -> None:
    code = """
with ray_cluster({address!r}):
    pool = RayResourcePool([2], resources_per_process={{"CPU": 0.5}})
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Diary))
    print(*group.execute_all(Diary.pid))
"""
    (pids,) = drive(code, cluster_address, kill=True)
    alive = [psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))]
    assert not psutil.wait_procs(alive, timeout=10)[1]
