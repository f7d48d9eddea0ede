"""`practicum routes inspect | diff | verify`: recordings of routed experts, for people. See docs/recordings.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from practicum.messages import Debug, errors_as_messages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table

    from practicum.replay.format import RecordingHeader
    from practicum.replay.statistics import Difference, Statistics, Verdict

app = typer.Typer(no_args_is_help=True, help="Look into recordings of routed experts.", pretty_exceptions_enable=False)

Recorded = Annotated[Path, typer.Argument(help="A recording: the file of rank 0.", metavar="FILE")]

DAMAGED = 1
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_IDS = 5
_STOPPED = "interrupted."


@app.command()
def inspect(
    file: Recorded,
    png: Annotated[
        Path | None, typer.Option(help="Draw the load as a heatmap, layers by experts.", metavar="OUT.png")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show what a recording holds, what it takes, and how evenly its experts are used."""
    with errors_as_messages(debug, interrupted=_STOPPED):
        from practicum.replay.statistics import statistics
        from practicum.replay.store import Recording

        with Recording(file) as recording:
            header, found, steps = recording.header, statistics(recording), recording.steps
        console = _console()
        _print(console, _summary(file, header, found, steps))
        if found.load.sum():
            console.print(_load_chart(header, found.load, console.width))
        if png is not None:
            from practicum.replay.heatmap import draw_heatmap

            draw_heatmap(found.load, header.layers, f"{header.model}: {found.num_tokens:,} tokens", png)
            _print(console, [f"heatmap: {png}"])


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A")],
    second: Annotated[Path, typer.Argument(metavar="B")],
    debug: Debug = False,
) -> None:
    """Show where and how much two recordings of the same samples disagree."""
    with errors_as_messages(debug, interrupted=_STOPPED):
        from practicum.replay.statistics import difference
        from practicum.replay.store import Recording

        with Recording(first) as one, Recording(second) as other:
            found, header = difference(one, other), one.header
            lengths = [one.entry(start.id).num_tokens for start in found.first]
        console = _console()
        _print(console, _comparison(header, found, lengths))
        if found.num_tokens:
            console.print(_difference_chart(header, found))


@app.command()
def verify(
    files: Annotated[
        list[Path], typer.Argument(help="Recordings; other ranks of each are read too.", metavar="FILE...")
    ],
    debug: Debug = False,
) -> None:
    """Read everything and say what is whole. Exit code 1 when something is damaged."""
    with errors_as_messages(debug, interrupted=_STOPPED):
        from practicum.replay.statistics import verify as verdicts

        whole = True
        console = _console()
        for file in files:
            for verdict in verdicts(file):
                _print(console, _judgement(verdict))
                whole = whole and verdict.is_whole
        if not whole:
            raise typer.Exit(DAMAGED)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print(console: Console, lines: list[str]) -> None:
    """Print lines as they are: ids and texts are no markup, and may hold what is no Unicode."""
    for line in lines:
        console.print(line.encode("utf-8", "backslashreplace").decode(), markup=False, highlight=False, soft_wrap=True)


def _summary(file: Path, header: RecordingHeader, found: Statistics, steps: list[int]) -> list[str]:
    size = found.size
    dtype = header.dtype.__name__
    ranks = f", {header.num_ranks} ranks" if header.num_ranks > 1 else ""
    in_steps = f" in {found.num_steps} steps, {steps[0]} to {steps[-1]}" if steps else ""
    replaced = f"; {found.num_replaced:,} records were replaced by later ones" if found.num_replaced else ""
    without = f"{found.num_unknown:,} ({found.num_unknown / max(1, found.num_tokens):.2%})"
    lines = [
        f"{file}: {_bytes(found.num_bytes)} in {found.num_chunks} chunks{ranks}",
        f"  model           {header.model}, tokenizer {header.tokenizer}",
        f"  routers         {header.k} of {header.num_experts} experts in {len(header.layers)} layers, {dtype}",
    ]
    if header.made:
        lines.append(f"  made with       {', '.join(f'{name} {value}' for name, value in header.made.items())}")
    lines += [
        f"  samples         {found.num_samples:,}{in_steps}{replaced}",
        f"  tokens          {found.num_tokens:,}, without a record {without}",
    ]
    if found.num_tokens:
        over = size.routes / size.bound - 1 if size.bound else 0.0
        beside = f"{abs(over):.1%} {'above' if over >= 0 else 'below'} the bound"
        lines += [
            f"  bytes a token   routes {size.routes:.1f} ({beside}), all that is recorded {size.everything:.1f}",
            f"                  as int32 {size.int32:.1f}, as {dtype} {size.array:.1f}, "
            f"bound log2 C({header.num_experts}, {header.k}) {size.bound:.1f}",
        ]
    if found.num_lost_bytes:
        lines.append(f"  damaged          {found.num_lost_bytes:,} bytes: see `practicum routes verify`")
    return lines


def _load_chart(header: RecordingHeader, load: NDArray[np.int64], width: int) -> Table:
    from practicum.replay.statistics import balance

    ratios = load / load.mean(axis=1, keepdims=True)
    bars = f"experts 0 to {header.num_experts - 1} (▄ even, █ twice that)"
    table = _table(bars, bars, "max/mean", "entropy", "dead")
    for layer, own, row in zip(header.layers, load, ratios, strict=True):
        even = balance(own)
        figures = f"{even.imbalance:.2f}", f"{even.entropy:.1%}", str(even.num_dead)
        table.add_row(str(layer), _bars(row, max(16, width - 41)), *figures)
    return table


def _bars(row: NDArray[np.float64], columns: int) -> str:
    """Draw a row in so many columns: neighbours share one, which is empty where none of them got a token."""
    import numpy as np

    sharing = -(-len(row) // columns)
    starts = np.arange(0, len(row), sharing)
    heights = np.add.reduceat(row, starts) / np.diff([*starts, len(row)])
    heights = np.repeat(heights, max(1, 32 // len(heights)))
    return "".join(" " if height == 0 else _BARS[min(7, max(0, round(height * 4) - 1))] for height in heights)


def _comparison(header: RecordingHeader, found: Difference, lengths: list[int]) -> list[str]:
    lines = [f"samples in both   {found.num_common:,}"]
    if found.with_other_tokens:
        which = _some(found.with_other_tokens)
        lines.append(f"  other tokens    {len(found.with_other_tokens):,}, compared up to there: {which}")
    for name, ids in (("only in A", found.only_in_first), ("only in B", found.only_in_second)):
        if ids:
            lines.append(f"{name}         {len(ids):,}: {_some(ids)}")
    total = found.num_tokens * len(header.layers)
    if not total:
        return [*lines, "nothing to compare: no token is recorded in both"]
    differing, experts = int(found.differing.sum()), int(found.differing_experts.sum())
    lines.append(f"token-layers      {total:,} compared, {differing:,} differ ({differing / total:.3%})")
    if not differing:
        return [*lines, "no set of experts differs"]
    lines.append(f"where they differ {experts / differing:.2f} of {header.k} experts are others on average")
    positions = sorted(start.position for start in found.first)
    earliest = min(found.first, key=lambda start: start.position)
    of = lengths[found.first.index(earliest)]
    lines += [
        f"it starts         at token {earliest.position} of {of} of sample {earliest.id}, in layer {earliest.layer}",
        f"                  in {len(found.first):,} of {found.num_common:,} samples, at token "
        f"{positions[len(positions) // 2]} in the median",
    ]
    return lines


def _difference_chart(header: RecordingHeader, found: Difference) -> Table:
    table = _table("", "tokens sent elsewhere", "", "other experts")
    shares = found.differing / found.num_tokens
    most = max(float(shares.max()), 1e-12)
    for layer, share, experts in zip(header.layers, shares, found.differing_experts, strict=True):
        mean = f"{experts / found.num_tokens:.4f} of {header.k}"
        table.add_row(str(layer), f"{share:.3%}", "█" * round(24 * float(share) / most), mean)
    return table


def _judgement(verdict: Verdict) -> list[str]:
    held = f"{verdict.num_samples:,} records in {verdict.num_chunks} chunks"
    if verdict.is_whole:
        lines = [f"{verdict.path}: whole: {held}, {_bytes(verdict.num_bytes)}"]
    elif not verdict.num_bytes:
        lines = [f"{verdict.path}: DAMAGED: {verdict.problems[0].reason}"]
    else:
        lost = sum(problem.size for problem in verdict.problems)
        lines = [f"{verdict.path}: DAMAGED: {lost:,} of {verdict.num_bytes:,} bytes cannot be used; whole are {held}"]
        lines += [f"  at byte {one.offset:,} ({one.size:,} bytes): {one.reason}" for one in verdict.problems]
    if verdict.unfinished:
        lines.append(f"  {verdict.unfinished:,} bytes at the end are of an unfinished chunk: being written, or cut off")
    return lines


def _table(bars: str, *columns: str) -> Table:
    """Return a table of layers with these columns, of which `bars` is drawn."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", *columns):
        table.add_column(name, justify="left" if name == bars else "right", no_wrap=name == bars)
    return table


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:_SHOWN_IDS]) + (", ..." if len(ids) > _SHOWN_IDS else "")


def _bytes(num: int) -> str:
    size = float(num)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
