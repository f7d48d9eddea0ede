from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.reward.router.bodies import CHUNKED, EMPTY, UNTIL_CLOSE, BadBody, Body, Framing

TOKEN = "abcdefghijklmnopqrstuvwxyzABCXYZ0189-_!#$%&'*+.^`|~"

tokens = st.text(TOKEN, min_size=1, max_size=8).map(str.encode)
# Chunks that look like the end of a body, or of a head, are what a careless reader trips over.
contents = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"0", b"\r\n\r\n", b"0\r\n\r\n"]), min_size=1, max_size=8).map(
        b"".join
    ),
)
extensions = st.lists(
    st.one_of(
        tokens.map(lambda name: b";" + name),
        st.tuples(tokens, tokens).map(lambda pair: b";" + pair[0] + b"=" + pair[1]),
        st.tuples(tokens, tokens).map(lambda pair: b";" + pair[0] + b'="' + pair[1] + b' ;"'),
    ),
    max_size=2,
).map(b"".join)
trailers = st.lists(st.tuples(tokens, tokens).map(lambda pair: b"x-" + pair[0] + b": " + pair[1] + b"\r\n"), max_size=3)


@st.composite
def chunked_bodies(draw: st.DrawFn) -> bytes:
    def size(number: int) -> bytes:
        digits = b"%x" % number
        return b"0" * draw(st.integers(0, 3)) + (digits.upper() if draw(st.booleans()) else digits)

    chunks = [
        size(len(content)) + draw(extensions) + b"\r\n" + content + b"\r\n"
        for content in draw(st.lists(contents, max_size=5))
    ]
    return b"".join([*chunks, size(0) + draw(extensions) + b"\r\n", *draw(trailers), b"\r\n"])


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def end_of(body: Body, pieces: list[bytes]) -> int:
    """How many bytes the body takes of these until it is done."""
    num = 0
    for piece in pieces:
        taken = body.take(piece)
        num += taken
        if body.done:
            return num
        assert taken == len(piece), "a body that is not done takes all there is"
    raise AssertionError("the body did not end")


@given(st.data(), chunked_bodies(), st.binary(max_size=30))
def test_a_chunked_body_ends_exactly_where_it_does_however_it_is_cut(
    data: st.DataObject, chunked: bytes, other: bytes
) -> None:
    assert end_of(CHUNKED.body(), data.draw(cut(chunked + other))) == len(chunked)


@given(chunked_bodies(), chunked_bodies())
def test_one_chunked_body_right_behind_another(first: bytes, second: bytes) -> None:
    assert end_of(CHUNKED.body(), [first + second]) == len(first)


@given(chunked_bodies())
def test_a_chunked_body_byte_by_byte_is_not_done_before_its_end(chunked: bytes) -> None:
    body = CHUNKED.body()
    for index, byte in enumerate(chunked):
        assert not body.done, chunked[:index]
        assert body.take(bytes([byte])) == 1
    assert body.done


def test_a_large_chunk_in_many_pieces() -> None:
    chunked = b"100000\r\n" + b"\r\n\r\n" * (0x100000 // 4) + b"\r\n0\r\n\r\n"
    pieces = [chunked[start : start + 65536] for start in range(0, len(chunked), 65536)]
    assert end_of(CHUNKED.body(), [*pieces, b"more"]) == len(chunked)


@pytest.mark.parametrize(
    "chunks",
    [
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"\r\n",
        b"1 \r\na\r\n",
        b" 1\r\na\r\n",
        b"1\na\r\n",
        b"1\r\na\n",
        b"1\r\nab\r\n",
        b"2\r\na\r\n0\r\n\r\n",
        b"1\r\na0\r\n\r\n",
        b"fffffffffffffffff\r\n",
        b"1;\x00\r\na\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nx : y\r\n\r\n",
        b"0\n\n",
    ],
)
@pytest.mark.parametrize("good", [b"", b"3\r\nabc\r\n"])
def test_chunks_in_doubt_are_refused(good: bytes, chunks: bytes) -> None:
    with pytest.raises(BadBody, match="bad chunk"):
        end_of(CHUNKED.body(), [good + chunks])
    with pytest.raises(BadBody, match="bad chunk"):
        end_of(CHUNKED.body(), [bytes([byte]) for byte in good + chunks])


@given(st.binary(max_size=60))
def test_random_bytes_are_chunks_or_refused_and_nothing_else(noise: bytes) -> None:
    body = CHUNKED.body()
    try:
        taken = body.take(noise)
    except BadBody:
        return
    assert taken <= len(noise)
    assert body.done or taken == len(noise)


@given(st.data(), st.integers(0, 50), st.integers(0, 30))
def test_a_sized_body_takes_its_bytes_and_no_more(data: st.DataObject, length: int, num_more: int) -> None:
    body = Framing.of_length(length).body()
    assert body.done is (length == 0)
    sent = b"x" * (length + num_more)
    assert sum(body.take(piece) for piece in data.draw(cut(sent))) == length
    assert body.done


def test_a_body_of_nothing_is_done_at_once() -> None:
    assert Framing.of_length(0) == EMPTY
    assert EMPTY.body().done
    assert EMPTY.body().take(b"GET") == 0


def test_a_body_that_ends_with_its_connection_takes_all_and_is_never_done() -> None:
    body = UNTIL_CLOSE.body()
    assert body.take(b"abc") == 3
    assert body.take(b"") == 0
    assert not body.done
