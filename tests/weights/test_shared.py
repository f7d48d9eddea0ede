from __future__ import annotations

import pytest

from practicum.errors import RolloutError
from practicum.weights import ChannelSettings, WeightReceiver
from practicum.weights.channels import SharedSender, SharedTicket
from tests.weights.sending import copied, random_tensors


def test_another_process_is_told_which_channel_to_use() -> None:
    update = WeightReceiver().receive(SharedTicket(2, 1, "somebody"))
    with pytest.raises(RolloutError, match=r"version 2 .*'shared': they are in process 1 .* 'shm' on one machine"):
        copied(update.tensors)


def test_only_the_newest_is_there_and_none_after_closing() -> None:
    sender = SharedSender(ChannelSettings())
    first, second = sender.send(1, random_tensors(1)), sender.send(2, random_tensors(2))
    with pytest.raises(RolloutError, match="the sender is at version 2 by now"):
        copied(WeightReceiver().receive(first).tensors)
    sender.close()
    with pytest.raises(RolloutError, match="the sender is closed by now"):
        copied(WeightReceiver().receive(second).tensors)
