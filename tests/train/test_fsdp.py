from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from practicum.errors import ModelError
from practicum.models import load_model
from practicum.train.fsdp import join_ranks, shard, whole
from practicum.train.model import LogProbModel


class Shards(Worker):
    def __init__(self, model_path: str) -> None:
        self.plain = load_model(model_path)
        model = load_model(model_path)
        self.root = LogProbModel(model)
        shard(self.root, model, join_ranks(self.context, torch.device("cpu"), 60.0), torch.float32)

    def meets_at(self) -> set[str]:
        """The addresses at which this process listens for the ranks to meet."""
        places = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        return {place.ip for place in places if place.port == self.context.master_port}

    def address(self) -> str:
        return self.context.master_address

    def sizes(self) -> tuple[int, int]:
        held = sum(parameter.to_local().numel() for parameter in self.root.parameters())  # type: ignore[attr-defined]
        return held, sum(parameter.numel() for parameter in self.plain.parameters())

    def gathered_equals_plain(self) -> bool:
        plain = dict(self.plain.named_parameters())
        return all(torch.equal(whole(p), plain[name]) for name, p in self.root.model.named_parameters())


@pytest.mark.slow
def test_two_ranks_hold_half_each_and_give_the_whole_back(tiny_model: Path, ray_session: None) -> None:
    with RayResourcePool([2]) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Shards, str(tiny_model)))
        try:
            for held, total in group.execute_all(Shards.sizes):
                assert held == pytest.approx(total / 2, rel=0.05)
            assert group.execute_all(Shards.gathered_equals_plain) == [True, True]
            assert group.execute_all(Shards.meets_at) == [{group.execute_rank_zero(Shards.address)}, set()]
        finally:
            group.shutdown()


def test_a_model_without_named_layers_is_refused() -> None:
    class Odd(torch.nn.Module):
        _no_split_modules: Any = None

    with pytest.raises(ModelError, match="Odd does not name its layers"):
        shard(torch.nn.Module(), Odd(), None, torch.float32)  # type: ignore[arg-type]
