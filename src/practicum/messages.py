"""Errors as the person at the command line meets them."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from practicum.errors import PracticumError, WorkerError

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

USER_ERROR, WORKER_ERROR = 2, 1


@contextmanager
def errors_as_messages(
    debug: bool, interrupted: str = "interrupted. resume=auto continues from the newest checkpoint."
) -> Iterator[None]:
    """An error made on purpose is a paragraph and an exit code; anything else is a bug and keeps its traceback."""
    signal.signal(signal.SIGTERM, _terminated)  # so that `finally` blocks run and no worker is left behind
    try:
        yield
    except (KeyboardInterrupt, _Terminated) as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 143
        _fail(interrupted, code)
    except PracticumError as error:
        if debug:
            traceback.print_exc()
            if isinstance(error, WorkerError) and error.remote_traceback:
                typer.echo(f"\non the worker:\n{error.remote_traceback}", err=True)
        cause = error.cause if isinstance(error, WorkerError) else error
        if isinstance(cause, PracticumError):
            _fail(str(cause), USER_ERROR)
        hint = "" if debug else "\nresume=auto continues from the newest checkpoint; --debug shows the traceback."
        _fail(f"{error}{hint}", WORKER_ERROR)


class _Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt no Exception, so that nobody takes it for a failure of theirs."""


def _terminated(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
