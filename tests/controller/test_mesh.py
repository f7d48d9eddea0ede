from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.controller import Coordinates, Mesh

sizes = st.integers(1, 5)


@given(sizes, sizes, sizes)
def test_each_rank_has_a_place_of_its_own_and_each_shard_one_answer(data: int, tensor: int, pipeline: int) -> None:
    mesh = Mesh(data=data, tensor=tensor, pipeline=pipeline)
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    answers = [places[rank] for rank in mesh.answering_ranks()]
    assert answers == [Coordinates(data=shard, tensor=0, pipeline=pipeline - 1) for shard in range(data)]


def test_ranks_count_like_a_torch_mesh() -> None:
    import torch

    layout = torch.arange(2 * 3 * 4).reshape(2, 3, 4)  # pipeline, data, tensor
    mesh = Mesh(pipeline=2, data=3, tensor=4)
    for rank in range(mesh.size):
        place = mesh.coordinates(rank)
        assert layout[place.pipeline, place.data, place.tensor] == rank


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Mesh(data=0)
