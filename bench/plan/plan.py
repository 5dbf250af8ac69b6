"""Plans of runs, their stopping rules, presets, files of cases and faults to inject."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from parbench.bench.files import convert_read_errors, decode_json, read_toml
from parbench.bench.limits import Count, NonNegative, NumRanks, NumRepetitions, Rank
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import OPERATIONS
from parbench.bench.plan.params import Setting
from parbench.bench.text import UserError, parse_duration


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of ``--inject``, which disturbs one rank on purpose."""

    kind: Literal["late", "slow", "corrupt"]
    """``late`` delays each step, ``slow`` lengthens each step, ``corrupt`` makes results wrong."""
    rank: Rank
    """The global rank that is disturbed."""
    amount: NonNegative = 0.0
    """The delay in seconds of ``late``, the added fraction of a step's time of ``slow``, or 0."""
    text: str
    """The fault as it was given to ``--inject``."""


def parse_fault(text: str, nproc: int) -> FaultSpec:
    """Return the fault in the text of ``--inject``, such as ``late:1:3ms``.

    ``nproc`` is the number of ranks of the run. Raises ``UserError`` if the text is not valid or
    names a rank that does not exist.
    """
    kind, _, rest = text.strip().partition(":")
    rank, _, amount = rest.partition(":")
    seconds_or_share = 0.0
    if kind == "late" and amount:
        seconds_or_share = parse_duration(amount)
    elif kind == "slow" and re.fullmatch(r"\d{1,9}(\.\d{1,9})?%", amount, re.ASCII):
        seconds_or_share = float(amount.removesuffix("%")) / 100
    elif kind != "corrupt" or amount:
        hint = "write late:RANK:3ms, slow:RANK:10% or corrupt:RANK"
        raise UserError(f"invalid fault --inject {text!r}", hint=hint)
    if rank not in map(str, range(nproc)):
        raise UserError(f"--inject {text!r}: {rank!r} is not a rank from 0 to {nproc - 1}")
    fault = {"kind": kind, "rank": int(rank), "amount": seconds_or_share, "text": text}
    return msgspec.convert(fault, FaultSpec)


class SkippedCase(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark with parameter values that was selected but cannot run on these ranks."""

    case: Case
    """The benchmark and the values of its parameters."""
    reason: str
    """A sentence with the reason why the case cannot run, and what to change."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decide how many timed samples of each case a repetition takes.

    A repetition is one start of all ranks. It takes the samples of a small operation in several
    blocks, between which it measures other cases. It takes the samples of a training step or a
    large operation in one block.
    """

    warmup: Count = 5
    """The number of untimed steps before the first sample."""
    min_iterations: Count = 6
    """The least number of samples of a case whose samples are taken in one block.

    The precision is checked only after them. If the time is short, fewer are taken, but at least
    two. Cases whose samples are split into several blocks do not use this setting.
    """
    max_iterations: Count = 1000
    """The largest number of samples of a case in a repetition."""
    precision: NonNegative = 0.025
    """The precision for which samples are taken.

    It is the half-width of the 95 % confidence interval of the median duration of a sample, as a
    fraction of the median. A single block of a case ends when it is reached. In several blocks, it
    decides on the number of samples of the next block.
    """
    seed: int = 0
    """The seed of the random order of blocks and of the test data."""
    seconds_per_case: NonNegative | None = None
    """The seconds that a repetition may spend on each collective or other operation, on average.

    A training step counts like 20 operations and a custom step like 10. All cases of a repetition
    together may take at most the sum of these seconds over the cases. A single case may take more
    than its part of the sum. None if only the time budget limits the time of a repetition.
    """


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run is to measure: its cases, its ranks and its time."""

    preset: str
    """The name of the preset, or ``import:TOOL`` for results of another tool."""
    cases: tuple[Case, ...]
    """The cases to measure."""
    skipped: tuple[SkippedCase, ...]
    """The selected cases that cannot run on these ranks, with the reasons."""
    nproc: NumRanks
    """The number of ranks on all nodes together."""
    backend: str
    """``gloo`` or ``nccl``."""
    device: str
    """``cpu`` or ``cuda``."""
    repetitions: NumRepetitions
    """The number of times that all ranks are started and measure all cases."""
    budget_seconds: NonNegative
    """The time budget of the whole run."""
    timeout_seconds: NonNegative
    """The time after which a case counts as hung if it has begun no further step."""
    measure: Measure = Measure()
    """The settings that decide on the number of samples of each case."""
    emulation: str = ""
    """A phrase about nodes or links that are emulated, empty if all are real."""
    notes: tuple[str, ...] = ()
    """Sentences about limits of the results of the run."""
    injection: FaultSpec | None = None
    """The fault to inject, None without a fault."""
    link_bytes_per_second: NonNegative | None = None
    """The nominal speed of the links in one direction, None if the user has not stated a speed."""
    path: str | None = None
    """A folder from which ranks import custom steps, None for a run without custom steps.

    It is the last folder of ``sys.path``.
    """
    spread: NodeLayout | None = None
    """The distribution of the ranks over nodes, None if srun does not start the ranks."""

    @property
    def is_imported(self) -> bool:
        """True for results of another tool."""
        return self.preset.startswith("import:")

    @property
    def limitations(self) -> tuple[str, ...]:
        """Sentences about limits of the results: a note about emulation, if any, and ``notes``."""
        emulated = [f"emulated: {self.emulation}"] if self.emulation else []
        return (*emulated, *self.notes)


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of a preset or a file of cases, which selects benchmarks and sets their parameters."""

    name: str
    """A glob of names of benchmarks, such as ``all_reduce`` or ``workload.*``."""
    set: Mapping[str, Setting] = {}
    """The values of parameters by name, such as ``size_bytes`` with ``1K:16M:x4``.

    K, M and G are powers of 1024, and ``x4`` multiplies the size by 4 from value to value. Several
    values of a parameter make several cases.
    """


_CASE_WEIGHTS = {"workload": 20.0, "custom": 10.0}
"""The time shares of a training step and of a custom step, by kind of case.

A share is relative to that of any other case, such as a collective, which is 1.
"""


def get_case_weight(case: Case) -> float:
    """Return the weight of a case: its share of the sampling time, relative to a collective.

    The time for samples is divided among all cases in proportion to their weights. A training step
    has the weight 20, because it is also profiled. A custom step has the weight 10, and every other
    case 1.
    """
    return _CASE_WEIGHTS.get(case.kind, 1.0)


def compute_sampling_seconds(cases: Sequence[Case], measure: Measure) -> float:
    """Return the largest time in seconds in which a repetition measures all these cases together.

    It is ``measure.seconds_per_case`` times the sum of the weights of the cases: 20 for a training
    step, 10 for a custom step, and 1 for any other case. The result is infinite if
    ``seconds_per_case`` is None, because then only the time budget limits the samples.
    """
    if measure.seconds_per_case is None:
        return math.inf
    return measure.seconds_per_case * sum(map(get_case_weight, cases))


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A named selection of benchmarks with parameter values, and the time to measure them."""

    help: str
    """A phrase about purpose and duration of the preset, on two cores, for ``parbench list``."""
    entries: tuple[Entry, ...]
    """The parameter values of benchmarks. Several entries of a benchmark make several cases."""
    unnamed_entries: tuple[Entry, ...] = ()
    """More entries, which are used only if the user names no cases.

    Entries for process groups are left out if there are less than four ranks.
    """
    repetitions: int
    """The number of times that all ranks are started and measure all cases."""
    budget_seconds: float
    """The time budget of a run with the start of the ranks, but without the report."""
    # Eight ranks on two cores take half of this time to explain a step of a hybrid mesh.
    timeout_seconds: float = 60
    """The time after which a case counts as hung if it has begun no further step."""
    measure: Measure = Measure()
    """The settings that decide on the number of samples of each case."""


def _make_entries_for_tag(tag: str, **settings: str) -> tuple[Entry, ...]:
    """Return an entry for each operation that has the tag, all with the same parameter values.

    ``tag`` is ``main`` or ``sized``. ``settings`` are values by the name of the parameter, as text
    of ``--set``: in the sizes ``1K:64M:x4``, K and M are powers of 1024, and ``x4`` is the factor
    between two sizes.
    """
    return tuple(
        Entry(name=spec.short_name, set=settings) for spec in OPERATIONS if tag in spec.tags
    )


PRESETS = {
    "smoke": Preset(
        help="every operation and training step once at small sizes, about 90 s",
        entries=(
            *_make_entries_for_tag("main", size_bytes="1K,1M"),
            *_make_entries_for_tag("sized", size_bytes="64K"),
        ),
        repetitions=1,
        budget_seconds=85,
        measure=Measure(precision=0.05, max_iterations=200),
    ),
    "node": Preset(
        help="collectives, p2p and training steps of this node, 5 repetitions, under 2 min",
        entries=(
            *_make_entries_for_tag("main", size_bytes="1K:16M:x4", mode="blocking"),
            *_make_entries_for_tag("main", size_bytes="1K,16M", mode="pipelined"),
            *_make_entries_for_tag("sized", size_bytes="1M"),
            Entry(name="copy", set={"size_bytes": "16M"}),
        ),
        unnamed_entries=(
            Entry(
                name="all_reduce",
                set={"size_bytes": "64K,1M,16M", "group": "pairs", "group_index": "0"},
            ),
            # Steps are small, so that five repetitions fit. A pipeline needs a layer per stage.
            Entry(name="workload.[!p]*", set={"microbatch": "1", "layers": "2"}),
            Entry(name="workload.pp", set={"microbatch": "1"}),
        ),
        repetitions=5,  # A regression check needs at least as many.
        budget_seconds=110,
        measure=Measure(warmup=3, min_iterations=5, seconds_per_case=0.05),
    ),
    "full": Preset(
        help="all steps, modes and groups, sizes to 64M (1G on GPUs), 10 repetitions, about 10 min",
        entries=(
            *_make_entries_for_tag("main", size_bytes="1K:64M:x2", mode="blocking"),
            *_make_entries_for_tag("main", size_bytes="1K:64M:x8", mode="pipelined"),
            *_make_entries_for_tag("main", size_bytes="64K,16M", mode="async"),
            *_make_entries_for_tag("main", size_bytes="1M", dtype="bfloat16,int32,float8_e4m3fn"),
            *_make_entries_for_tag("sized", size_bytes="1K:64M:x16"),
            Entry(name="copy", set={"size_bytes": "1K:64M:x8"}),
            Entry(name="all_reduce", set={"size_bytes": "1M", "group": "node,across,pairs"}),
            Entry(name="all_reduce", set={"size_bytes": "1M", "background": "gemm"}),
        ),
        repetitions=10,
        budget_seconds=600,
        timeout_seconds=120,
        measure=Measure(precision=0.01, max_iterations=2000),
    ),
}


class CasesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file of ``--cases``."""

    case: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1)]
    """The cases to measure, which replace those of the preset."""


def read_cases_file(path: Path) -> tuple[Entry, ...]:
    """Return the cases of a file of ``--cases``: JSON if its name ends in ``.json``, else TOML.

    Raises ``UserError`` if the file cannot be read or has other content.
    """
    if path.suffix != ".json":
        return read_toml(path, "file of cases", CasesFile).case
    with convert_read_errors(f"file of cases {path}", "is not valid"):
        return decode_json(path.read_bytes(), CasesFile).case
