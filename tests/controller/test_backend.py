from __future__ import annotations

from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs, RayWorkerGroup, Worker, open_controller


class Closing(Worker):
    closed = 0

    def hello(self) -> str:
        return f"rank {self.rank}"

    def close(self) -> None:
        Closing.closed += 1


def test_the_same_code_runs_on_both_backends_and_ends_its_groups(ray_session: None) -> None:
    for backend, kind in (("local", LocalWorkerGroup), ("ray", RayWorkerGroup)):
        with open_controller(backend, num_workers=1, use_gpu=False, max_colocate_count=2) as controller:  # type: ignore[arg-type]
            group = controller.group(RayClassWithInitArgs(Closing), name="closing")
            assert isinstance(group, kind)
            assert group.execute_all(Closing.hello) == ["rank 0"]
    assert Closing.closed == 1  # in this process; the Ray worker's process is gone
