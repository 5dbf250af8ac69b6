"""Records: one JSON line for each case and repetition.

A case is a benchmark with values of its parameters. A repetition is one start of all ranks.
"""

import enum
import gzip
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from parbench.bench.files import convert_read_errors, decode_json, read_lines
from parbench.bench.limits import (
    Count,
    NonNegative,
    NumRanks,
    Rank,
    RepetitionIndex,
    check_timestamp,
)
from parbench.bench.plan.cases import Case
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.stats import (
    Grade,
    compute_relative_iqr,
    grade_noise,
)
from parbench.bench.text import UserError

SCHEMA = 2
"""The version of the format of ``run.json`` and ``records.jsonl``."""


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that most often begins a sample last, and the rank that most often ends it last."""

    method: str
    """A phrase about the method by which the clocks of the ranks were compared."""
    uncertainty: NonNegative
    """The uncertainty (s) of the comparison of two ranks' clocks."""
    late_rank: Rank | None
    """The rank that most often arrives last, by more than the uncertainty. None if none does."""
    share: NonNegative | None
    """The fraction of all timed samples in which ``late_rank`` arrives last by that much.

    None if ``late_rank`` is None.
    """
    last_out_rank: Rank | None
    """The rank that most often finishes last, None without samples."""
    last_out_share: NonNegative | None
    """The fraction of all timed samples that ``last_out_rank`` finishes last, None without it."""


def find_stragglers(
    last_arrivals: Sequence[int],
    last_exits: Sequence[int],
    skew_seconds: Sequence[float],
    method: str,
    uncertainty: float,
) -> Stragglers:
    """Find the rank that most often arrives last and the rank that most often finishes last.

    The sequences have an element for each timed sample. ``last_arrivals`` holds the rank that
    arrived last, ``last_exits`` the rank that finished last, and ``skew_seconds`` the time between
    the first and the last arrival. ``method`` is a phrase about the comparison of the ranks'
    clocks, and ``uncertainty`` its uncertainty in seconds.
    """
    skews = zip(last_arrivals, skew_seconds, strict=True)
    late_ranks = [rank for rank, skew in skews if skew > uncertainty]
    late_rank, late_share = _find_most_common(late_ranks, len(last_arrivals))
    last_out_rank, last_out_share = _find_most_common(last_exits, len(last_arrivals))
    return Stragglers(
        method=method,
        uncertainty=uncertainty,
        late_rank=late_rank,
        share=late_share,
        last_out_rank=last_out_rank,
        last_out_share=last_out_share,
    )


def _find_most_common(ranks: Sequence[int], total: int) -> tuple[int | None, float | None]:
    """Return the most frequent rank in ``ranks``, and the fraction of ``total`` that it has.

    ``total`` is the number of all samples. Both results are None if ``ranks`` is empty.
    """
    if not ranks:
        return None, None
    [(rank, count)] = Counter(ranks).most_common(1)
    return rank, round(count / total, 4)


COMPUTE, COPY, PHASE, COMM = "compute", "copy", "phase", "comm"
"""The names of the streams of a timeline. A stream of communication is named ``comm AXIS``."""


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """A piece of work of a rank in the timeline of a step, such as a collective or computation.

    Its times are in microseconds since the first rank began the step.
    """

    stream: str
    """The kind of work: ``compute``, ``copy``, ``phase``, or ``comm AXIS``.

    It is the row in a plot of the timeline. ``comm AXIS`` is communication on a mesh axis.
    """
    name: str
    """The operation of a communication call, the name of a phase, otherwise equal to ``stream``."""
    start_us: float
    """The start of the work."""
    stop_us: float
    """The end of the work."""
    num_bytes: int | None = None
    """The size of a communication call as nccl-tests counts it.

    None if the size is unknown, or if this is not a communication call.
    """


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one rank in one training step.

    Intervals of a stream do not overlap, except on streams of communication.
    """

    rank: Rank
    """The global rank."""
    start_us: float
    """The start of the step in microseconds since the first rank began the step."""
    stop_us: float
    """The end of the step in microseconds since the first rank began the step."""
    intervals: tuple[Interval, ...]
    """The pieces of work of all streams."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The work of all ranks in one training step, from a profile."""

    clock: str
    """A phrase about the method by which the clocks of the ranks were compared."""
    uncertainty_seconds: NonNegative
    """The uncertainty of the comparison of two ranks' clocks."""
    ranks: tuple[RankTimeline, ...]
    """The timeline of each rank, in the order of global ranks."""


def encode_timeline(timeline: Timeline) -> bytes:
    """Return the timeline as JSON compressed by gzip. Equal timelines have equal bytes."""
    return gzip.compress(msgspec.json.encode(timeline), mtime=0)


MIN_HIDDEN = 0.9
"""The fraction of samples with a hidden launch from which on a time on a GPU excludes launches.

A launch is hidden if all ranks had launched the work of the sample before a device began it.
"""
Status = Literal["ok", "failed", "hang", "wrong", "skipped"]
"""The result of a case: measured, error, timeout, wrong numbers, or not measured."""
Stop = Literal["precision", "max-iters", "budget", "blocks"]
"""The reason why sampling of a case ended.

``precision``: the interval of the median is narrow enough. ``max-iters``: the largest number of
samples is reached. ``budget``: the time is over. ``blocks``: all planned blocks of samples are
done.
"""


class SkipReason(enum.Enum):
    """The reason why a selected case was not measured in a repetition (one start of all ranks)."""

    IMPOSSIBLE = "impossible"
    """These ranks or this machine cannot run the case, for example because memory is missing."""
    OUT_OF_BUDGET = "out-of-budget"
    """The time budget of the run ended before the case was measured."""
    EARLIER_FAILURE = "earlier-failure"
    """The case failed, hung or was wrong in an earlier repetition."""


CulpritCause = Literal["died", "terminated", "raised", "absent", "waiting"]
"""The way in which a rank caused a failure or a hang.

``died``: its process ended. ``terminated``: its process got SIGTERM. ``raised``: it raised an
exception. ``absent``: it did not arrive where other ranks waited for it. ``waiting``: it is one of
several ranks that wait for one another. For ``terminated`` and ``raised``, the real cause may be
another rank.
"""


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that may have caused the failure or the hang of a case."""

    rank: Rank
    """The global rank."""
    host: str
    """The name of the rank's host."""
    cause: CulpritCause
    """The failure of the rank.

    ``died``: its process ended. ``terminated``: its process got SIGTERM. ``raised``: it raised an
    exception. ``absent``: it did not arrive where other ranks waited for it. ``waiting``: it is one
    of several ranks that wait for one another.
    """


class WorldInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The number, the backend and the device of the ranks that a case ran on."""

    size: NumRanks
    """The number of all ranks, also if the case measured only a group of them."""
    nodes: Count
    """The number of different hosts of the ranks, 0 if it is unknown."""
    backend: str
    """``gloo`` or ``nccl``."""
    device: str
    """``cpu`` or ``cuda``."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the numerical check of a case, which compares its output with a reference.

    Both fields are None if the case has no reference or was not measured.
    """

    passed: bool | None = None
    """True if no element of the output is wrong, False if any is, None without a comparison."""
    wrong: Count | None = None
    """The number of wrong elements on all ranks together, None without a comparison."""


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a case in one repetition: the time of a step, as the maximum over ranks."""

    values: list[NonNegative] = []
    """The time of one step in each sample, in seconds, in the order of measurement.

    A sample that times several steps together counts as one, with their mean time.
    """
    samples_per_block: list[Count] = []
    """The number of samples of each block.

    The samples of a block follow one another directly. Between blocks other cases run.
    """


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """The variation of the samples (times of a step) of a case within one repetition."""

    grade: Grade
    """A word for the size of ``spread``: ``stable``, ``fair``, ``noisy`` or ``very noisy``."""
    spread: NonNegative
    """The interquartile range of the samples over their median, as a fraction."""


def compute_noise(samples: Samples) -> Noise | None:
    """Return the interquartile range of the samples over their median, and its grade.

    Returns None without samples.
    """
    if not samples.values:
        return None
    relative_iqr = compute_relative_iqr(samples.values)
    return Noise(grade=grade_noise(relative_iqr), spread=round(relative_iqr, 4))


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rank at the time when its case failed or hung."""

    rank: Rank
    """The global rank."""
    host: str
    """The name of the rank's host."""
    pid: Count
    """The process id of the rank on its host."""
    state: str
    """A phrase about the process or its progress, such as ``alive`` or ``timed, step 12``."""
    stack: str = ""
    """The Python stack of the rank as text, empty if it is unknown."""
    is_silent: bool = False
    """True if the rank did not answer when the driver asked all ranks for their state."""


class RecordedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of measuring one benchmark, or the reason why it failed or was skipped."""

    status: Status
    """``ok``, ``failed`` (an error), ``hang``, ``wrong`` (numbers) or ``skipped``."""
    reason: str = ""
    """A sentence for people about a status other than ``ok``, empty if the status is ``ok``."""
    skip_reason: SkipReason | None = None
    """The reason of status ``skipped`` as a value of an enum, None for any other status."""
    wrong_by_rank: dict[Rank, Count] = {}
    """The number of wrong elements on each rank that has wrong elements, by rank."""
    culprits: tuple[Culprit, ...] = ()
    """The ranks that may have caused a failure or hang, empty if no rank differs from others."""
    stop: Stop | None = None
    """The reason why no more samples were taken, None if the case was not measured.

    The median is precise, the largest number of samples is reached, the time is over, or all
    planned blocks of samples are done.
    """
    check: Check = Check()
    """The comparison of the results with a reference."""
    samples: Samples = Samples()
    """The time of a step in each sample, as the maximum over ranks.

    Empty if the case was not measured.
    """
    metrics: dict[str, MetricValue] = {}
    """The values of metrics by name, such as ``time`` and ``busbw``."""
    arrival: Stragglers | None = None
    """The ranks that most often arrive or finish last, None if arrivals were not timed."""
    details: dict[str, Any] = {}
    """Facts that are not metrics, by name, such as ``size_bytes`` or a struct of ``details.py``."""
    notes: list[str] = []
    """Sentences about limits of the result."""
    ranks: list[RankState] = []
    """The state of each rank if the case failed or hung, otherwise empty."""


class Record(RecordedOutcome, frozen=True, kw_only=True):
    """The result of one case (a benchmark with parameter values) in one start of all ranks."""

    schema: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA
    """The version of the format of the record."""
    case: Case
    """The benchmark and the values of its parameters."""
    world: WorldInfo
    """The ranks that the case ran on."""
    repetition: RepetitionIndex
    """The number of the repetition, a start of all ranks, from 0."""
    noise: Noise | None = None
    """The variation of the samples within this repetition, None without samples."""
    injected: str = ""
    """The fault that was injected on purpose, as text of ``--inject``. Empty without a fault."""
    emulation: str = ""
    """A phrase about nodes or links that are emulated, empty if all are real."""
    environment: dict[str, Any] = {}
    """The facts about hosts and software that differ from ``environment`` in ``run.json``.

    The key ``changed`` holds the facts that differ on all ranks, by path such as ``host.os``, as a
    list of the old and the new value. The key ``rank 3`` holds the facts of rank 3 that differ from
    those of other ranks.
    """
    started: str
    """The time in UTC, as ISO 8601, at which the case began."""
    seconds: NonNegative
    """The wall time of the case with its preparation, warm-up and checks."""

    @property
    def is_out_of_budget(self) -> bool:
        """True if the time budget of the run ended before the case was measured."""
        return self.skip_reason is SkipReason.OUT_OF_BUDGET


def encode_record(record: Record) -> bytes:
    """Return the record as one line of JSON, with its newline.

    NaN and infinity become null.
    """
    return msgspec.json.encode(record) + b"\n"


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a ``records.jsonl`` file, and skip a last line that was cut short.

    Raises ``UserError`` for any other line that is not a record, or that has another version of the
    format.
    """
    with convert_read_errors(path):
        for number, line in read_lines(path):
            place = f"{path}, line {number}"
            with convert_read_errors(place, "is not a record"):
                check_schema(line, place)
                record = decode_json(line, Record)
                check_timestamp(record.started)
            yield record


class _SchemaVersion(msgspec.Struct):
    """The part of a file that states the version of its format."""

    schema: int
    """The version."""


def check_schema(content: bytes, place: str) -> None:
    """Raise ``UserError`` if the field ``schema`` of a JSON object is not ``SCHEMA``.

    Args:
        content: the JSON object. Other fields than ``schema`` are not decoded, because another
            version may have other fields.
        place: the file, and the line if it has several objects, for the message.
    """
    version = msgspec.json.decode(content, type=_SchemaVersion).schema
    if version != SCHEMA:
        raise UserError(
            f"{place} has schema version {version}, and this parbench reads {SCHEMA}: "
            "use the parbench version that wrote it"
        )
