from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.errors import ReplayError
from practicum.replay.format import RecordingHeader
from practicum.replay.records import RecordedSample
from practicum.replay.store import Recording, RouteWriter, rank_path
from tests.replay.recordings import HEADER, make_batch, make_record, same, same_routes, write

ROOT = Path(__file__).parents[2]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=8),
    shape=st.sampled_from([(8, 2), (64, 8), (300, 4), (512, 10), (1, 1)]),
    chunk_tokens=st.integers(1, 200),
)
def test_what_was_recorded_is_read_to_the_last_bit(
    lengths: list[tuple[int, int]], shape: tuple[int, int], chunk_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header = RecordingHeader("moe-1", (0, 3), *shape, "tokenizer-2")
    records = [
        make_record(f"s{i}", 7, i, prompt=prompt, answer=answer, header=header)
        for i, (prompt, answer) in enumerate(lengths)
    ]
    path = write(tmp_path_factory.mktemp("recording") / "routes", records, header, chunk_tokens)
    with Recording(path) as recording:
        assert recording.header == header and recording.steps == [7] and len(recording) == len(records)
        assert all(same(one, back) for one, back in zip(records, recording.records(7), strict=True))
        backwards = [record.id for record in reversed(records)]
        for one, routes in zip(reversed(records), recording.routes(backwards), strict=True):
            assert same_routes(one.routes, routes)


def test_samples_are_found_by_id_and_by_step_in_the_order_of_the_batch(tmp_path: Path) -> None:
    first, second = make_batch(1, 6), make_batch(2, 3)
    path = write(tmp_path / "new" / "folder" / "routes", [*reversed(second), *first])
    with Recording(path) as recording:
        assert recording.steps == [1, 2]
        assert recording.ids == [record.id for record in [*first, *second]]
        assert "1-4" in recording and "3-0" not in recording
        assert same(recording.record("1-4"), first[4])
        assert recording.entry("2-1").num_tokens == 8
        with pytest.raises(ReplayError, match=r"sample 3-0 is not in .*routes\.$"):
            recording.record("3-0")
        with pytest.raises(ReplayError, match=r"step 3 is not in .*: it holds steps 1 to 2"):
            recording.records(3)


def test_what_is_given_out_can_be_changed_without_harm(tmp_path: Path) -> None:
    record = make_record("a")
    with Recording(write(tmp_path / "routes", [record])) as recording:
        taken = recording.record("a")
        taken.routes.experts[:] = 0
        taken.sample.token_ids[:] = 0
        assert same(recording.record("a"), record)


def test_a_sample_recorded_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    path = write(tmp_path / "routes", make_batch(1, 4))
    again = [make_record(f"1-{place}", 1, place, seed=9) for place in (1, 2)]
    write(path, again)
    with Recording(path) as recording:
        assert len(recording) == 4 and recording.ids == ["1-0", "1-1", "1-2", "1-3"]
        assert same(recording.record("1-1"), again[0]) and same(recording.record("1-3"), make_batch(1, 4)[3])


def test_ranks_write_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    records = make_batch(1, 6)
    for rank in range(2):
        write(path, records[rank::2], replace(HEADER, rank=rank, num_ranks=2))
    assert rank_path(path, 1) == tmp_path / "routes.1"
    with Recording(path) as recording:
        assert all(same(one, back) for one, back in zip(records, recording.records(1), strict=True))
    # Resumed, a sample may come to another rank: what was written last counts.
    again = make_record("1-1", 1, 1, seed=5)
    write(path, [again], replace(HEADER, rank=0, num_ranks=2))
    with Recording(path) as recording:
        assert len(recording) == 6 and same(recording.record("1-1"), again)
    with pytest.raises(ReplayError, match=r"routes\.1 is the part of rank 1"):
        Recording(tmp_path / "routes.1")
    (tmp_path / "routes.1").unlink()
    with pytest.raises(ReplayError, match=r"routes\.1, the part of rank 1 of 2, cannot be read: No such file"):
        Recording(path)
    write(path, [], replace(HEADER, rank=1, num_ranks=2, model="other"))
    with pytest.raises(
        ReplayError, match=r"routes\.1 does not belong to .*: it has model other, not qwen3_moe-1f2e3d4c"
    ):
        Recording(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "olmoe-5"}, "model qwen3_moe-1f2e3d4c, not olmoe-5"),
        ({"tokenizer": "t5"}, "tokenizer tokenizer-77, not t5"),
        ({"layers": (1, 2)}, "number of layers that route 3, not 2"),
        ({"layers": (1, 2, 6)}, r"layers \[1, 2, 5\], not \[1, 2, 6\]"),
        ({"num_experts": 64}, "number of experts 8, not 64"),
        ({"k": 4}, "experts per token 2, not 4"),
    ],
)
def test_the_recording_of_another_model_is_refused_and_both_are_named(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    path = write(tmp_path / "routes", make_batch(1, 2))
    before = path.read_bytes()
    other = replace(HEADER, **change)  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match=f"routes cannot be continued: it was made with {complaint}"):
        RouteWriter(path, other)
    with Recording(path) as recording:
        recording.check(replace(HEADER, rank=1, num_ranks=4, made={}))
        with pytest.raises(ReplayError, match=f"routes does not fit: it was made with {complaint}"):
            recording.check(other)
    assert path.read_bytes() == before


def test_going_on_with_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "routes", [])
    with pytest.raises(ReplayError, match="rank 0 of 1, not 0 of 2"):
        RouteWriter(path, replace(HEADER, num_ranks=2))


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (make_record("x", header=replace(HEADER, num_experts=16)), "sample x: routes of 2 of 16 experts in 3 layers"),
        (replace(make_record("x"), routes=make_record("y", answer=9).routes), "sample x: routes of 12 tokens for 8"),
    ],
)
def test_routes_that_do_not_fit_are_refused_by_sample(tmp_path: Path, record: RecordedSample, complaint: str) -> None:
    with RouteWriter(tmp_path / "routes", HEADER) as writer:
        with pytest.raises(ReplayError, match=complaint):
            writer.append([record])
        good = make_record("good")
        twice = make_record("bad")
        twice.routes.experts[1, 1] = 3
        with pytest.raises(ReplayError, match=r"samples bad to bad: .*\[3, 3\] are not 2 of 8 experts"):
            writer.append([twice])
        writer.append([good])
    with Recording(tmp_path / "routes") as recording:
        assert recording.ids == ["good"]


def test_a_file_cut_off_anywhere_keeps_all_whole_chunks_and_can_be_gone_on_with(tmp_path: Path) -> None:
    records = [record for step in range(5) for record in make_batch(step, 6)]
    whole = write(tmp_path / "whole", records).read_bytes()
    with Recording(tmp_path / "whole") as recording:
        ends = [
            (chunk.head.offset + chunk.head.size, {entry.id for entry in chunk.samples})
            for chunk in recording.files[0].chunks
        ]
        first = recording.files[0].chunks[0].head.offset
    assert len(ends) > 5
    kept = {record.id: record for record in records}
    more = make_record("more", 99)
    dice = random.Random(1)
    path = tmp_path / "cut"
    for cut in [0, 1, first - 1, first, first + 1, *dice.sample(range(len(whole)), 1000)]:
        path.write_bytes(whole[:cut])
        expected = {id for end, ids in ends if end <= cut for id in ids}
        if cut < first:
            with pytest.raises(ReplayError, match="ends before its header does"):
                Recording(path)
        else:
            with Recording(path) as recording:
                assert set(recording.ids) == expected
                assert all(
                    same(recording.record(id), kept[id]) for id in dice.sample(sorted(expected), len(expected) // 6)
                )
        write(path, [more])
        with Recording(path) as recording:
            assert set(recording.ids) == expected | {"more"} and same(recording.record("more"), more)
            assert not recording.files[0].lost and not recording.files[0].unfinished


def test_a_damaged_bit_never_gives_a_wrong_row(tmp_path: Path) -> None:
    records = [record for step in range(5) for record in make_batch(step, 6)]
    kept = {record.id: record for record in records}
    path = write(tmp_path / "routes", records)
    whole = path.read_bytes()
    dice = random.Random(2)
    num_refused = num_missing = 0
    for bit in dice.sample(range(len(whole) * 8), 1000):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            recording = Recording(path)
        except ReplayError as error:
            assert str(path) in str(error)
            num_refused += 1
            continue
        with recording:
            bad = set(kept) - set(recording.ids)
            for id in recording.ids:
                try:
                    assert same(recording.record(id), kept[id])
                except ReplayError as error:
                    assert str(path) in str(error) and "at byte" in str(error)
                    bad.add(id)
            assert 0 < len(bad) <= 5  # those of one chunk: all others stay readable
            num_missing += len(bad)
    assert num_refused < 200 and num_missing


def test_routes_are_read_from_a_chunk_of_which_other_sections_are_damaged(tmp_path: Path) -> None:
    record = make_record("a")
    path = write(tmp_path / "routes", [record])
    with Recording(path) as recording:
        chunk = recording.files[0].chunks[0]
    data = bytearray(path.read_bytes())
    data[chunk.payload_offset + chunk.sections["words"].start] ^= 1
    path.write_bytes(data)
    with Recording(path) as recording:
        assert same_routes(recording.routes(["a"])[0], record.routes)
        with pytest.raises(ReplayError, match=r"chunk 0, at byte \d+, is damaged: the section 'words' has the wrong"):
            recording.record("a")


def test_a_file_that_shrinks_under_a_reader_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "routes", make_batch(1, 6))
    with Recording(path) as recording:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ReplayError, match="damaged"):
            recording.records(1)


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    with RouteWriter(tmp_path / "routes", HEADER), pytest.raises(ReplayError, match="being written by another process"):
        RouteWriter(tmp_path / "routes", HEADER)
    RouteWriter(tmp_path / "routes", HEADER).close()


def test_what_is_no_recording_is_neither_read_nor_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for content in (b"dear diary", b"\0" * 5000):
        path.write_bytes(content)
        for use in (Recording, lambda path: RouteWriter(path, HEADER)):
            with pytest.raises(ReplayError, match=r"notes\.txt cannot be used: it does not begin as a recording does"):
                use(path)
        assert path.read_bytes() == content
    with pytest.raises(ReplayError, match="cannot be read: Is a directory"):
        Recording(tmp_path)
    with pytest.raises(ReplayError, match="nowhere cannot be read: No such file"):
        Recording(tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["/proc/routes", "/dev/null/routes", "/dev/full"])
def test_where_nothing_can_be_written_the_error_names_path_and_reason(path: str) -> None:
    reason = "No space left on device" if path == "/dev/full" else "(No such file|Not a directory|File exists)"
    with pytest.raises(ReplayError, match=f"recording {path} cannot be written: {reason}"):
        RouteWriter(path, HEADER)


def test_when_the_disk_is_full_what_was_written_stays_and_writing_can_go_on(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    first, second = make_batch(1, 4), make_batch(2, 40)
    with RouteWriter(path, HEADER, 40) as writer:
        writer.append(first)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 2000, limits[1]))
        try:
            with pytest.raises(ReplayError, match="routes cannot be written: File too large"):
                writer.append(second)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with Recording(path) as recording:
            assert {"1-0", "1-3", "2-0"} <= set(recording.ids) and len(recording) < 44
            assert recording.files[0].unfinished is None
        writer.append(second)
    with Recording(path) as recording:
        assert len(recording) == 44 and all(same(*pair) for pair in zip(second, recording.records(2), strict=True))


def writing_process(path: Path) -> subprocess.Popen[bytes]:
    """Appends step after step until it is killed."""
    program = (
        "import sys, itertools\n"
        "from practicum.replay.store import RouteWriter\n"
        "from tests.replay.recordings import HEADER, make_batch\n"
        "with RouteWriter(sys.argv[1], HEADER, 40) as writer:\n"
        "    for step in itertools.count(int(sys.argv[2])):\n"
        "        writer.append(make_batch(step, 6))\n"
    )
    first = str(max(Recording(path).steps) + 1 if path.exists() else 0)
    return subprocess.Popen([sys.executable, "-c", program, str(path), first], cwd=ROOT)


def test_a_writer_that_is_killed_is_read_meanwhile_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    num_seen = 0
    for round in range(2):
        process = writing_process(path)
        try:
            deadline = time.monotonic() + 60
            while (not path.exists() or path.stat().st_size < 2000) and time.monotonic() < deadline:
                time.sleep(0.01)
            with Recording(path) as recording:
                num_seen = len(recording)
                num_new = 0
                while num_new < 60 and time.monotonic() < deadline:
                    num_new += recording.refresh()
                    if len(recording):
                        entry = recording.entry(recording.ids[-1])
                        assert same(recording.record(entry.id), make_record(entry.id, entry.step, entry.place))
                assert num_new >= 60 and len(recording) == num_seen + num_new
                with pytest.raises(ReplayError, match="being written by another process"):
                    RouteWriter(path, HEADER)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        with Recording(path) as recording:
            assert len(recording) >= num_seen + num_new, round
            for id in recording.ids:
                entry = recording.entry(id)
                assert same(recording.record(id), make_record(id, entry.step, entry.place))
            assert not recording.files[0].lost


def test_only_the_chunks_that_are_needed_are_read(tmp_path: Path) -> None:
    """So random access to a large recording costs no more than to a small one."""
    path = write(tmp_path / "routes", [record for step in range(20) for record in make_batch(step, 5)])
    data = bytearray(path.read_bytes())
    with Recording(path) as recording:
        chunks = recording.files[0].chunks
        for chunk in chunks[:-1]:
            data[chunk.payload_offset : chunk.payload_offset + chunk.head.payload_bytes] = bytes(
                chunk.head.payload_bytes
            )
    path.write_bytes(data)
    with Recording(path) as recording:
        assert len(recording) == 100
        assert np.array_equal(recording.record("19-4").routes.known, make_batch(19, 5)[4].routes.known)
