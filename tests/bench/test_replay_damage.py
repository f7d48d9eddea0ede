from __future__ import annotations

from pathlib import Path

from bench import replay_damage


def test_what_is_read_of_damaged_files_is_right_and_all_there_is(tmp_path: Path) -> None:
    for damage in (replay_damage.cut_off(60, tmp_path, seed=3), replay_damage.flipped(60, tmp_path, seed=4)):
        assert damage.num_files == 60 and damage.num_refused < 30
        assert damage.num_rows > 0 and damage.num_refused_samples > 0
        assert damage.num_wrong_rows == damage.num_crashes == damage.num_lost_needlessly == 0
