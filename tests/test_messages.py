from __future__ import annotations

import signal

import pytest
import typer

from practicum.errors import ReplayError, WorkerError
from practicum.messages import errors_as_messages


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ReplayError("no such file"), 2, "error: no such file\n"),
        (
            WorkerError("rank 1 raised", group="actor", ranks=[1], cause=ReplayError("bad routes")),
            2,
            "error: bad routes\n",
        ),
        (WorkerError("rank 1 is gone", group="actor", ranks=[1]), 1, "error: rank 1 is gone\nresume=auto continues"),
        (KeyboardInterrupt(), 130, "error: stopped by you\n"),
    ],
)
def test_an_error_is_a_paragraph_and_an_exit_code(
    raised: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ending, errors_as_messages(debug=False, interrupted="stopped by you"):
        raise raised
    assert ending.value.exit_code == code
    assert capsys.readouterr().err.startswith(said)


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_messages(debug=False):
        raise ZeroDivisionError


def test_sigterm_ends_it_with_its_own_code() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(typer.Exit) as ending, errors_as_messages(debug=False):
            signal.raise_signal(signal.SIGTERM)
        assert ending.value.exit_code == 143
    finally:
        signal.signal(signal.SIGTERM, before)
