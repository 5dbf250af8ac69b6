"""Plans of runs, their stopping rules, presets, plan files and faults to inject."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from parbench.bench.files import convert_read_errors, decode_json, read_file, read_toml
from parbench.bench.limits import Count, NonNegative, NumRanks, NumRepetitions, Rank
from parbench.bench.machine.environment import describe_emulation
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.plan.cases import Case, group_by_variables
from parbench.bench.plan.catalogue import OPERATIONS
from parbench.bench.plan.params import Setting
from parbench.bench.text import UserError, parse_duration


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of ``--inject``, which disturbs one rank."""

    kind: Literal["late", "slow", "corrupt"]
    rank: Rank
    amount: NonNegative = 0.0
    """The seconds of ``late``, the fraction of a step of ``slow``, 0 for ``corrupt``."""
    text: str
    """The fault as it was given to ``--inject``."""


def parse_fault(text: str, nproc: int) -> FaultSpec:
    """Return the fault in the text of ``--inject``. Raises ``UserError`` if it is not valid."""
    pattern = r"(late|slow|corrupt):(\d{1,9})(?::(.+))?"
    match = re.fullmatch(pattern, text.strip(), re.ASCII)
    if match is None or (match[3] is None) != (match[1] == "corrupt"):
        hint = "write late:RANK:3ms, slow:RANK:10% or corrupt:RANK"
        raise UserError(f"--inject {text!r} is not understood: {hint}")
    kind, rank = match[1], int(match[2])
    if rank >= nproc:
        ranks = f"the {nproc} ranks, 0 to {nproc - 1}"
        raise UserError(f"--inject {text!r}: rank {rank} is not one of {ranks}")
    amount = 0.0
    if kind == "late":
        amount = parse_duration(match[3])
    if kind == "slow":
        percentage = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)%", match[3], re.ASCII)
        amount = float(percentage[1]) / 100 if percentage else 0.0
        if amount == 0:
            problem = f"{match[3]!r} is not a share of a step"
            raise UserError(f"--inject {text!r}: {problem}", hint="write a percentage such as 10%")
    return msgspec.convert({"kind": kind, "rank": rank, "amount": amount, "text": text}, FaultSpec)


class SkippedCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case of the plan that cannot run here, with the reason."""

    case: Case
    reason: str


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decide how many samples of a case are taken."""

    warmup: Count = 5
    """The number of untimed steps before the first sample."""
    min_iterations: Count = 6
    max_iterations: Count = 1000
    precision: NonNegative = 0.025
    """The required half-width of the interval, relative to the median."""
    seed: int = 0
    more_blocks: Count = 0
    """The number of extra blocks of an imprecise case, if a repetition has time left."""
    seconds_per_case: NonNegative | None = None
    """The time for the samples of a case of weight 1 in one repetition.

    None if only the time budget limits the samples.
    """

    def extend_to_budget(self) -> "Measure":
        """Return settings with which a run uses all of a time budget that the user has set."""
        return msgspec.structs.replace(
            self, max_iterations=max(self.max_iterations, 2000), more_blocks=10
        )


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run measures: its cases, its ranks and its time."""

    preset: str
    cases: tuple[Case, ...]
    skipped: tuple[SkippedCase, ...]
    nproc: NumRanks
    backend: str
    device: str
    repetitions: NumRepetitions
    budget_seconds: NonNegative
    """The time budget of the whole run."""
    timeout_seconds: NonNegative
    """The time after which a block of a case counts as hung."""
    measure: Measure = Measure()
    emulation: str = ""
    """A text about nodes or links that are not real, empty if all are real."""
    notes: tuple[str, ...] = ()
    """Sentences about limits of the results of the run."""
    injection: FaultSpec | None = None
    """The fault to inject, None without a fault."""
    link_bytes_per_second: NonNegative | None = None
    """The speed of the links in one direction, None if the user has not stated a speed."""
    path: str | None = None
    """A folder from which ranks import targets. All other folders take precedence."""
    sources: dict[str, str] = {}
    """The SHA-256 of the file of each custom step, by target."""
    spread: NodeLayout | None = None
    """The layout of the ranks on nodes, None if srun does not start the ranks."""

    @property
    def is_imported(self) -> bool:
        """True for the plan of a log of another tool, which cannot be measured again."""
        return self.preset.startswith("import:")

    @property
    def limitations(self) -> tuple[str, ...]:
        """The notes of the plan, preceded by a note about emulated nodes or links if any are."""
        emulated = [describe_emulation(self.emulation)] if self.emulation else []
        return (*emulated, *self.notes)


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A glob that selects cases by name, and the values of their parameters."""

    name: str
    set: Mapping[str, Setting] = {}


_CASE_WEIGHTS = {"workload": 20.0, "custom": 10.0}


def get_case_weight(case: Case) -> float:
    """Return the time that a case gets, relative to the time of a collective operation.

    A training step with its explanation takes about as long as 20 collectives.
    """
    return _CASE_WEIGHTS.get(case.kind, 1.0)


SHORT_REPETITIONS = 3
"""The repetitions of a run of named cases, which is the least number for an interval."""
FEW_OPERATIONS = 4
FEW_OPERATIONS_REPETITIONS = 5
"""The repetitions of a run of a few named operations; the intervals of three are twice as wide."""
SHORT_SECONDS_PER_CASE = 0.3


def compute_sampling_seconds(cases: Sequence[Case], measure: Measure) -> float:
    """Return the seconds of one repetition for samples of these cases.

    The result is infinite if only the time budget limits the samples.
    """
    if measure.seconds_per_case is None:
        return math.inf
    return measure.seconds_per_case * sum(map(get_case_weight, cases))


def compute_short_budget(cases: Sequence[Case], measure: Measure, repetitions: int) -> float:
    """Return a time budget in seconds for a run of named cases.

    Only a slow or busy machine reaches it.
    """
    import_seconds, start_seconds = 30.0, 10.0
    startup_seconds = start_seconds * len(group_by_variables(cases))
    repetition_seconds = startup_seconds + 3 * compute_sampling_seconds(cases, measure)
    return import_seconds + repetitions * repetition_seconds


MIN_RANKS_OF_GROUPS = 4

BEYOND_CACHE = (256 << 20, 1 << 30)
"""The sizes that CUDA adds to presets with ``LARGE_BYTES``: 8 times a GPU's last-level cache."""
LARGE_BYTES = 16 << 20
PLATEAU = (4 << 30, 8 << 30)
"""The sizes that CUDA adds to presets with ``PLATEAU_BYTES``, if the GPU has the memory.

Eight GPUs with NVLink SHARP reach their highest bandwidth only there.
"""
PLATEAU_BYTES = 64 << 20


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A selection of cases, and the time to measure them."""

    help: str
    lasts: str
    """A text about the duration of a run on two cores."""
    entries: tuple[Entry, ...]
    entries_of_groups: tuple[Entry, ...] = ()
    """The entries that are added for at least MIN_RANKS_OF_GROUPS ranks if no cases are named."""
    other_settings: Mapping[str, Setting] = {}
    """The parameters by name of cases without an entry, if no cases are named."""
    repetitions: int
    budget_seconds: float
    """The time of a run with the start of the ranks, but without the report."""
    # Eight ranks on two cores take half of this time to explain a step of a hybrid mesh.
    timeout_seconds: float = 60
    measure: Measure = Measure()
    seconds_per_case: float | None = None
    """The time for the samples of a case of weight 1 if no cases are named.

    It is so short that all repetitions fit. None if only the time budget limits the samples.
    """


def _make_entries_for_tag(tag: str, **settings: str) -> tuple[Entry, ...]:
    """Return entries for all benchmarks that have the tag, with these settings."""
    return tuple(
        Entry(name=spec.short_name, set=settings) for spec in OPERATIONS if tag in spec.tags
    )


PRESETS = {
    "smoke": Preset(
        help="does everything work? once each, small",
        lasts="about 90 s",
        entries=(
            *_make_entries_for_tag("main", size_bytes="1K,1M"),
            *_make_entries_for_tag("sized", size_bytes="64K"),
        ),
        repetitions=1,
        budget_seconds=85,
        measure=Measure(precision=0.05, max_iterations=200),
    ),
    "node": Preset(
        help="how does this node communicate, and what do steps cost? 5 repetitions",
        lasts="under 2 min",
        entries=(
            *_make_entries_for_tag("main", size_bytes="1K:16M:x4", mode="blocking"),
            *_make_entries_for_tag("main", size_bytes="1K,16M", mode="pipelined"),
            *_make_entries_for_tag("sized", size_bytes="1M"),
            Entry(name="copy", set={"size_bytes": "16M"}),
        ),
        entries_of_groups=(
            Entry(
                name="all_reduce",
                set={"size_bytes": "64K,1M,16M", "group": "pairs", "group_index": "0"},
            ),
        ),
        other_settings={"microbatch": "1"},  # Steps are small, so that five repetitions fit.
        repetitions=5,  # A regression check needs at least as many.
        budget_seconds=110,
        seconds_per_case=0.05,
    ),
    "full": Preset(
        help="all steps, modes, groups, sizes to 64M; 10 repetitions",
        lasts="about 10 min",
        entries=(
            *_make_entries_for_tag("main", size_bytes="1K:64M:x2", mode="blocking"),
            *_make_entries_for_tag("main", size_bytes="1K:64M:x8", mode="pipelined"),
            *_make_entries_for_tag("main", size_bytes="64K,16M", mode="async"),
            *_make_entries_for_tag("main", size_bytes="1M", dtype="bfloat16,int32,float8_e4m3fn"),
            *_make_entries_for_tag("sized", size_bytes="1K:64M:x16"),
            Entry(name="copy", set={"size_bytes": "1K:64M:x8"}),
            Entry(name="matrix", set={"size_bytes": "1M"}),
            Entry(name="all_reduce", set={"size_bytes": "1M", "redop": "avg,min,max,product"}),
            Entry(name="all_reduce", set={"size_bytes": "1M", "placement": "out_of_place"}),
            *_make_entries_for_tag("uneven", size_bytes="1M", skew="0.5"),
            *_make_entries_for_tag("grouped", size_bytes="1M", group="node,across,pairs"),
            Entry(
                name="all_reduce",
                set={"size_bytes": "1M", "background": "gemm,all_reduce,all_to_all"},
            ),
            Entry(name="gemm", set={"background": "nothing,all_reduce,all_to_all"}),
            Entry(name="ddp", set={"reduce_dtype": "float32,bfloat16"}),
            Entry(name="fsdp", set={"reshard": "true,false"}),
        ),
        repetitions=10,
        budget_seconds=600,
        timeout_seconds=120,
        measure=Measure(precision=0.01, max_iterations=2000),
    ),
}


class PlanFile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The content of a plan file.

    The command line takes precedence over the file, and the file over the preset.
    """

    OPTIONS: ClassVar = ("preset", "nproc", "backend", "device", "repetitions", "budget", "timeout")
    preset: str | None = None
    nproc: Annotated[int, msgspec.Meta(ge=1)] | None = None
    backend: str | None = None
    device: str | None = None
    repetitions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    budget: str | float | None = None
    timeout: str | float | None = None
    case: tuple[Entry, ...] = ()


def read_plan_file(path: Path) -> PlanFile:
    """Read a plan file: JSON if its name ends in ``.json``, otherwise TOML."""
    if path.suffix != ".json":
        return read_toml(path, "plan file", PlanFile)
    with convert_read_errors(f"plan file {path}", "is not a plan"):
        return decode_json(read_file(path), PlanFile)
