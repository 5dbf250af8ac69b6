"""The columns of the result tables, as data: the terminal and the page show the same ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.records import Metric
from reports import cells
from reports.labels import operation, short_labels
from reports.summary import Row


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its cells as text, what to sort them by (None is unknown and goes last), and when to drop it.

    A terminal too narrow for all columns drops those with the highest ``drop`` first, 0 never.
    """

    title: str
    text: Callable[[Row], str]
    sort: Callable[[Row], float | str | None]
    help: str
    number: bool = True
    drop: int = 0


def communication_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return the columns of collectives and point-to-point operations; what tells rows apart is never dropped."""
    alike = {name: len({row.case.params.get(name) for row in rows}) < 2 for name in ("mode", "dtype")}
    return (
        _words("operation", lambda row: operation(row.case), "what is done; its parameters where it has any"),
        _words("mode", lambda row: _param(row, "mode"), "blocking or pipelined", drop=2 * alike["mode"]),
        _words("dtype", lambda row: _param(row, "dtype"), "element type", drop=3 * alike["dtype"]),
        Column(
            title="size",
            text=lambda row: cells.size(row.case.params.get("size_bytes")),
            sort=lambda row: _number(row.case.params.get("size_bytes")),
            help="total bytes as nccl-tests counts them, 1024-based",
        ),
        _duration("time"),
        _bandwidth("algbw"),
        _bandwidth("busbw"),
        *_quality(),
    )


def step_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return the columns of training steps; how a step is called depends on what it must be told apart from."""
    labels = short_labels(rows)
    return (
        _words("step", lambda row: labels[row.case.id], "the step, with the parameters in which steps differ"),
        _duration("step time"),
        Column(
            title="tokens/s",
            text=lambda row: cells.significant(_value(row, "tokens_per_second")),
            sort=lambda row: _value(row, "tokens_per_second"),
            help="tokens that all ranks together train on in a second",
        ),
        *_quality(),
        _words("notes", lambda row: "; ".join(row.notes) or cells.UNKNOWN, "what the row cannot claim", drop=10),
    )


def _duration(title: str) -> Column:
    return Column(
        title=title,
        text=lambda row: cells.measured(row.metrics.get(row.headline)),
        sort=lambda row: _value(row, row.headline),
        help="median with its 95 % interval",
    )


def _quality() -> tuple[Column, ...]:
    """Return the columns that say how far a row is to be trusted."""
    noise_help = "the worst launch's scatter: quiet, fair, noisy, wild"
    return (
        Column(
            title="p99",
            text=lambda row: cells.duration(_value(row, f"{row.headline}_p99")),
            sort=lambda row: _value(row, f"{row.headline}_p99"),
            help="99th percentile, from launches of at least 100 iterations",
            drop=4,
        ),
        _words("noise", lambda row: row.grade or cells.UNKNOWN, noise_help, drop=1),
        Column(
            title="n",
            text=lambda row: str(row.iterations) if row.iterations else cells.UNKNOWN,
            sort=lambda row: row.iterations,
            help="iterations of all launches",
            drop=7,
        ),
        Column(
            title="launches",
            text=lambda row: f"{row.launches}/{row.planned}",
            sort=lambda row: row.launches,
            help="launches that measured the case, of those planned",
            drop=5,
        ),
        _words("stop", lambda row: cells.counted(row.stops), "why measuring ended, by launch", drop=8),
        _words("check", check_word, "whether results equal the reference", drop=6),
    )


def check_word(row: Row) -> str:
    """Say in a word whether the row's results were right."""
    if row.check.passed is None:
        return "unchecked"
    if row.check.passed:
        return "ok"
    return "wrong" if row.check.wrong is None else f"{row.check.wrong} wrong"


def _words(title: str, text: Callable[[Row], str], help_text: str, drop: int = 0) -> Column:
    return Column(title=title, text=text, sort=text, help=help_text, number=False, drop=drop)


def _bandwidth(name: str) -> Column:
    return Column(
        title=f"{name} GB/s",
        text=lambda row: cells.gigabytes(_value(row, name)),
        sort=lambda row: _value(row, name),
        help=f"{'bus' if name == 'busbw' else 'algorithm'} bandwidth in 1e9 B/s, nccl-tests' convention",
        drop=0 if name == "busbw" else 9,
    )


def _param(row: Row, name: str) -> str:
    return str(row.case.params.get(name, cells.UNKNOWN))


def _value(row: Row, name: str) -> float | None:
    metric: Metric | None = row.metrics.get(name)
    return metric.value if metric else None


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None
