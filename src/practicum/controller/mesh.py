"""How the ranks of a group are laid out: shards of the batch, slices of each layer, stages of the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place in a mesh."""

    data: int
    tensor: int
    pipeline: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """`data` shards of the batch x `tensor` slices of each layer x `pipeline` stages of the model.

    Ranks count through `tensor` first, then `data`, then `pipeline`, like a torch `DeviceMesh` of shape
    (pipeline, data, tensor). All ranks with the same data coordinate work on the same shard; the one with the first
    slice of the last stage answers for it.
    """

    data: int
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline) < 1:
            raise ValueError(f"all sizes of a mesh must be positive: {self}")

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(data, tensor, pipeline)

    def answering_ranks(self) -> list[int]:
        """The rank that answers for each shard, in the order of the shards."""
        last_stage = (self.pipeline - 1) * self.data * self.tensor
        return [last_stage + shard * self.tensor for shard in range(self.data)]
