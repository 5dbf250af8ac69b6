"""Records: one JSON line for each case and repetition."""

import enum
import gzip
import math
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
    count_effective_samples,
    grade_noise,
)
from parbench.bench.text import UserError

SCHEMA = 2


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that most often arrive last at an iteration and leave it last."""

    method: str
    """A phrase about how the clocks of the ranks were compared."""
    uncertainty: NonNegative
    """The uncertainty of the clocks in seconds."""
    late_rank: Rank | None
    """None if no skew of arrivals exceeds the uncertainty."""
    share: NonNegative | None
    """The share of iterations at which ``late_rank`` arrives last, by more than the uncertainty."""
    last_out_rank: Rank | None
    """The rank that most often leaves last, None without iterations."""
    last_out_share: NonNegative | None
    """The share of iterations that ``last_out_rank`` leaves last."""


def find_stragglers(
    last_arrivals: Sequence[int],
    last_exits: Sequence[int],
    skew_seconds: Sequence[float],
    method: str,
    uncertainty: float,
) -> Stragglers:
    """Find the rank that most often arrives last and the rank that most often leaves last.

    ``last_arrivals`` and ``last_exits`` hold the last rank of each iteration. ``skew_seconds``
    holds the time between the first and the last arrival of each iteration. ``method`` is a phrase
    about the comparison of clocks. ``uncertainty`` is the uncertainty of clocks in seconds.
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
    """Return the most common rank and its share of ``total``, None for both without ranks."""
    if not ranks:
        return None, None
    [(rank, count)] = Counter(ranks).most_common(1)
    return rank, round(count / total, 4)


COMPUTE, COPY, PHASE, COMM = "compute", "copy", "phase", "comm"
"""The names of the streams of a timeline. A stream of communication is named ``comm AXIS``."""


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """A piece of work on one stream of a rank.

    Its times are in microseconds since the first rank began the step.
    """

    stream: str
    name: str
    start_us: float
    stop_us: float
    num_bytes: int | None = None
    """The size of a call of communication as nccl-tests counts it, None if it is unknown."""


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The step of one rank. Only communication intervals of a stream may overlap."""

    rank: Rank
    start_us: float
    """The start of the step in microseconds since the first rank began the step."""
    stop_us: float
    """The end of the step on the same clock."""
    intervals: tuple[Interval, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The intervals of work in one step of all ranks."""

    clock: str
    """A phrase about how the clocks of the ranks were compared."""
    uncertainty_seconds: NonNegative
    ranks: tuple[RankTimeline, ...]


def encode_timeline(timeline: Timeline) -> bytes:
    """Return compressed JSON, which has the same bytes for equal timelines."""
    return gzip.compress(msgspec.json.encode(timeline), mtime=0)


MIN_HIDDEN = 0.9
"""The share of iterations with a hidden launch from which on a time on a GPU excludes launches."""
Status = Literal["ok", "failed", "hang", "wrong", "skipped"]
Stop = Literal["precision", "max-iters", "budget", "visits"]


class SkipReason(enum.Enum):
    """The reason why a selected case has no measurement in a repetition."""

    IMPOSSIBLE = "impossible"
    """These ranks or this machine cannot run the case, for example because it lacks memory."""
    OUT_OF_BUDGET = "out-of-budget"
    """The time budget ended before the case."""
    EARLIER_FAILURE = "earlier-failure"
    """The case failed, hung or was wrong in an earlier repetition."""


CulpritCause = Literal["died", "terminated", "raised", "absent", "waiting"]
"""The way in which a rank broke a case.

``terminated`` ranks got SIGTERM, ``absent`` ranks did not arrive where others waited, ``waiting``
ranks wait for one another. A ``terminated`` or ``raised`` rank may have suffered from another one.
"""


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that may have caused the failure of a case."""

    rank: Rank
    host: str
    cause: CulpritCause


class WorldInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that a case ran on."""

    size: NumRanks
    nodes: Count
    backend: str
    device: str


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of results with the reference. None means that nothing was compared."""

    passed: bool | None = None
    wrong: Count | None = None
    """The number of wrong elements on all ranks."""


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The durations of a case's samples, each the maximum over the ranks."""

    unit: str = "s"
    values: list[NonNegative] = []
    """The duration of each sample in the unit, in the order of measurement."""
    samples_per_block: list[Count] = msgspec.field(default_factory=list, name="visits")
    """The numbers of consecutive samples between which other cases ran, ``visits`` in JSON."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """The run-to-run variation of the samples of a case."""

    grade: Grade
    spread: NonNegative
    """The interquartile range over the median."""
    effective: NonNegative | None = None
    """The number of independent samples whose median would be as certain as this median.

    None with too few blocks.
    """


def compute_noise(samples: Samples) -> Noise | None:
    """Return the variation of samples, None if there are no samples."""
    if not samples.values:
        return None
    relative_iqr = compute_relative_iqr(samples.values)
    effective = count_effective_samples(samples.values, samples.samples_per_block)
    return Noise(
        grade=grade_noise(relative_iqr),
        spread=round(relative_iqr, 4),
        effective=None if effective is None else round(effective, 1),
    )


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rank when its case failed."""

    rank: Rank
    host: str
    pid: Count
    state: str
    """A phrase such as ``alive`` or ``timed, step 12``."""
    stack: str = ""
    """The Python stack of the rank as text, empty if it is unknown."""
    is_silent: bool = False
    """True if the rank did not answer when all ranks were asked for their state."""


class RecordedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one case: its measurement, or the reason why it failed or was skipped."""

    status: Status
    reason: str = ""
    """A sentence for people about a status other than ok. Programs read the fields below."""
    skip_reason: SkipReason | None = None
    """Set if the status is skipped."""
    wrong_by_rank: dict[Rank, Count] = {}
    """The number of wrong elements of each rank that has any."""
    culprits: tuple[Culprit, ...] = ()
    """The ranks that may have broken the case, as far as they differ from the others."""
    stop: Stop | None = None
    """The rule that ended the measurement."""
    check: Check = Check()
    samples: Samples = Samples()
    metrics: dict[str, MetricValue] = {}
    arrival: Stragglers | None = None
    details: dict[str, Any] = {}
    """Facts of the benchmark, for example the structs of ``details.py``."""
    notes: list[str] = []
    """Sentences about limits of the result."""
    ranks: list[RankState] = []
    """The state of each rank if the case ended badly."""


class Record(RecordedOutcome, frozen=True, kw_only=True):
    """The result of one case in one repetition."""

    schema: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA
    case: Case
    world: WorldInfo
    repetition: RepetitionIndex
    noise: Noise | None = None
    injected: str = ""
    """The fault that was injected on purpose."""
    emulation: str = ""
    """The nodes or links that are not real."""
    environment: dict[str, Any] = {}
    """The differences from the environment in ``run.json``."""
    started: str
    seconds: NonNegative
    """The time of the case with its preparation, warm-up and checks."""

    @property
    def is_out_of_budget(self) -> bool:
        """True if the time budget ended before the case."""
        return self.skip_reason is SkipReason.OUT_OF_BUDGET


def encode_record(record: Record) -> bytes:
    """Return the record as one line of JSON, with its newline.

    NaN and infinity become null, which metrics and details may have. Raises ``ValueError`` if a
    duration is not finite, because such a record could not be read back.
    """
    if not all(map(math.isfinite, (record.seconds, *record.samples.values))):
        raise ValueError(f"the record of {record.case.label} has a duration that is not finite")
    return msgspec.json.encode(record) + b"\n"


def read_records(path: Path, damaged: list[str] | None = None) -> Iterator[Record]:
    """Yield the records of a file, except a last line that was cut short.

    A message about each other bad line is added to ``damaged``. Without ``damaged``, a bad line
    raises ``UserError``.
    """
    with convert_read_errors(path):
        for number, line in read_lines(path):
            place = f"{path}, line {number}"
            try:
                check_schema(line, place)
                record = decode_json(line, Record)
                check_timestamp(record.started)
            except SchemaError:
                raise
            except (ValueError, RecursionError) as error:
                message = f"{place} is not a record: {error}"
                if damaged is None:
                    raise UserError(message) from error
                damaged.append(message)
            else:
                yield record


class _SchemaVersion(msgspec.Struct):
    schema: int


class SchemaError(UserError):
    """A file has a format version that this parbench does not read."""


def check_schema(content: bytes, place: str, expected: int = SCHEMA) -> None:
    """Raise ``SchemaError`` if JSON has another format version than expected.

    ``place`` names the file and the line in messages. Other fields are not decoded, because they
    may have changed.
    """
    version = msgspec.json.decode(content, type=_SchemaVersion).schema
    if version != expected:
        age = "newer" if version > expected else "older"
        message = f"schema {version} is {age} than {expected}, the one that this parbench reads"
        raise SchemaError(f"{place}: {message}")
