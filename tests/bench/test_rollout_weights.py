from __future__ import annotations

from bench.rollout_weights import CHANNELS, MEMCPY, measured


def test_every_channel_is_timed_against_a_plain_copy() -> None:
    tallies = measured(4_000_000, num_rounds=2)
    assert tallies.keys() == {MEMCPY, *CHANNELS}
    for tally in tallies.values():
        assert len(tally.seconds) == len(tally.cpu_seconds) == 2
        assert min(tally.seconds) > 0
