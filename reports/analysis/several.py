"""Several runs beside each other: in what they differ, and the rows that answer the same question. Pure."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import msgspec

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import convert_read_errors, decode_json, read_file
from parbench.bench.plan.cases import Case
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.runs import Run, list_runs, load_run
from parbench.bench.text import UserError
from parbench.reports.analysis.frame import group_rows, pivot_rows
from parbench.reports.analysis.labels import PAIRS, environment_facts, flatten
from parbench.reports.analysis.statistics import estimate_ratio
from parbench.reports.analysis.summary import Alike, Row, Summary, estimate_of, summarize
from parbench.reports.analysis.verdicts import Verdict
from parbench.reports.topology import Topology, read_topology


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What a report needs of a sweep's point; ``environment`` is empty where the sweep compares none."""

    id: str
    label: str = ""
    distribution: str = ""
    environment: str = ""

    @property
    def name(self) -> str:
        return self.label or self.id


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What a report needs of a sweep: its points in the order in which they run."""

    name: str = ""
    points: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        twice = [
            one for one, times in Counter(point.id for point in self.points).items() if times > 1
        ]
        if twice:  # each would read the same runs once more
            raise ValueError(f"points: {to_single_line(twice[0])} comes more than once")


SWEEP, RUNS = "sweep.json", "runs"
# what differs between any two runs and says nothing of either, and what does but may explain their times
_OF_EVERY_RUN, _CIRCUMSTANCES = (
    ("boot_id", "job", "SLURM_JOB_ID"),
    ("one_minute", "nodelist", "SLURM_JOB_NODELIST"),
)


@dataclass(frozen=True, kw_only=True)
class NumberedRun:
    """A run with its summary, the number by which tables call it, and the point of a sweep that it measured."""

    number: int
    run: Run
    summary: Summary
    point: Point | None = None

    @cached_property
    def nodes(self) -> Topology | None:
        return read_topology(self.run)

    @property
    def num_nodes(self) -> int:
        """How many nodes its ranks were on, or were to be on where they never started."""
        spread = self.run.info.plan.spread
        return max([row.world.nodes for row in self.summary.rows] + [spread.nodes if spread else 1])

    @property
    def name(self) -> str:
        return f"run {self.number}"

    @property
    def shown(self) -> tuple[Row, ...]:
        return tuple(row for row in self.summary.rows if row.metrics)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that is not the same in all runs, with each run's text."""

    name: str
    texts: tuple[str, ...]


class MatchedCase(Alike[int]):
    """A case in the runs that measured it, by the runs' numbers."""

    def ratio(self, number: int) -> MetricValue | None:
        """Return a run's time over the first's with its interval, None if either is unknown."""
        times = [
            row.metrics.get(row.headline) if row else None
            for row in (self.rows.get(number), self.first)
        ]
        one, base = map(estimate_of, times)
        if one is None or base is None:
            return None
        found = estimate_ratio(one, base)
        is_within_repetition = found.low is not None and any(
            time and time.is_within_repetition for time in times
        )
        return MetricValue(
            value=found.value,
            better="lower",
            low=found.low,
            high=found.high,
            is_within_repetition=is_within_repetition,
        )


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """Runs in the order in which they were given, in what they differ, and sentences on what is ``lacking``."""

    runs: tuple[NumberedRun, ...]
    differences: tuple[Difference, ...]
    lacking: tuple[str, ...] = ()

    @property
    def counting(self) -> tuple[NumberedRun, ...]:
        """The runs without those of a point that ran again later: its last run decides."""
        last = {one.point.id: one.number for one in self.runs if one.point}
        return tuple(one for one in self.runs if not one.point or last[one.point.id] == one.number)

    @property
    def code(self) -> int:
        """The exit code, that of a missing run included."""
        codes = [one.summary.tally.code for one in self.counting]
        if not codes or self.lacking:
            codes.append(ExitCode.DID_NOT_RUN)
        return combine_exit_codes(codes)

    @property
    def verdict(self) -> Verdict:
        bad = [one.name for one in self.counting if one.summary.tally.code]
        are = "is" if len(self.lacking) == 1 else "are"
        lacking = (
            f"; {len(self.lacking)} more that should be here {are} not" if self.lacking else ""
        )
        if bad:
            return Verdict(
                word="NOT FINE", level="bad", told=f"{', '.join(bad)} of {len(self.runs)}{lacking}"
            )
        told = f"all {len(self.runs)} runs" if len(self.runs) != 1 else "the one run"
        word = "INCOMPLETE" if self.lacking else "FINE"
        return Verdict(
            word=word,
            level="bad" if self.lacking else "good",
            told=f"{told}{' are fine' * bool(lacking)}{lacking}",
        )

    @property
    def words(self) -> str:
        """In what the runs differ, as a sentence; circumstances and what follows from the ranks were not asked for."""
        last = [(one, one.name.rpartition(".")[2]) for one in self.differences]
        asked = [
            one for one, name in last if name not in _CIRCUMSTANCES and not name.startswith(PAIRS)
        ]
        if not asked:
            return "Same setup: their times differ by circumstances or chance."
        if len(asked) == 1:
            return f"They differ in one thing, {asked[0].name}: {', '.join(asked[0].texts)}."
        return f"They differ in {len(asked)} things, so no one of them explains what their times differ by."


def several(
    runs: Sequence[tuple[Run, Summary]],
    points: Sequence[Point | None] = (),
    lacking: Sequence[str] = (),
) -> RunSet:
    """Return the runs, numbered from 1, with their differences; ``points`` are those that they measured, if any."""
    numbered = enumerate(zip_longest(runs, points), start=1)
    ones = tuple(
        NumberedRun(number=i, run=run, summary=summary, point=at)
        for i, ((run, summary), at) in numbered
    )
    facts = []
    for info in (run.info for run, _ in runs):
        plan = {
            name: getattr(info.plan, name)
            for name in ("preset", "nproc", "backend", "device", "repetitions")
        }
        told = dict(flatten({"plan": plan, "host": info.host, "parbench": info.parbench}))
        told |= {
            f"environment.{name}": text for name, text in environment_facts(info.environment or {})
        }
        facts.append(
            {
                name: text
                for name, text in told.items()
                if name.rpartition(".")[2] not in _OF_EVERY_RUN
            }
        )
    names = dict.fromkeys(name for one in facts for name in one)
    texts = {name: tuple(one.get(name, "-") for one in facts) for name in names}
    texts |= {f"{case} {name}": values for (case, name), values in _varying(ones).items()}
    different = (
        Difference(name=name, texts=values)
        for name, values in texts.items()
        if len(set(values)) > 1
    )
    return RunSet(runs=ones, differences=tuple(different), lacking=tuple(lacking))


def beside(several: RunSet) -> tuple[MatchedCase, ...]:
    """Return each case that two runs or more measured, matched without the parameters in which the runs differ."""
    varying = _varying(several.runs)

    def matched(case: Case) -> Case:
        params = {
            name: value for name, value in case.params.items() if (case.name, name) not in varying
        }
        return msgspec.structs.replace(case, params=params)

    shown = [(one.number, row) for one in several.runs for row in one.shown]
    found = pivot_rows(group_rows(shown, lambda one: matched(one[1].case)), lambda one: one[0])
    return tuple(
        MatchedCase(rows={number: rows[-1][1] for number, rows in one.items()}) for one in found
    )


def _varying(runs: Sequence[NumberedRun]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return by case name and parameter each run's value, where every run has one value throughout and they differ."""
    values: dict[tuple[str, str], dict[tuple[int, str], None]] = {}
    for one in runs:
        for row in one.summary.rows:
            for name, value in row.case.params.items():
                values.setdefault((row.case.name, name), {})[one.number, str(value)] = None
    numbers = [one.number for one in runs]
    alike = {
        key: [text for _, text in of]
        for key, of in values.items()
        if [number for number, _ in of] == numbers
    }
    return {key: tuple(texts) for key, texts in alike.items() if len(set(texts)) > 1}


def gather(paths: Sequence[Path], *, whole: bool = False) -> RunSet:
    """Return the runs in these folders, a sweep's in the order of its points; ``UserError`` where there is none.

    A run of a sweep that cannot be read, or any run unless ``whole``, is told in what is lacking.
    """
    folders: list[tuple[Path, Point | None, bool]] = []
    sweeps = {path: load_sweep(path).points for path in paths if is_sweep(path)}
    for path in paths:
        folders += [
            (run, point, False) for point in sweeps.get(path, ()) for run in runs_of(path, point)
        ]
        folders += [] if path in sweeps else [(path, point_of(path), whole)]
    without = [
        point for path, points in sweeps.items() for point in points if not runs_of(path, point)
    ]
    lacking, runs, points = [f"Not run: {point.name}." for point in without], [], []
    for folder, point, must in folders:
        try:
            run = load_run(folder)
        except UserError as error:
            if must:
                raise
            lacking.append(f"A run cannot be read: {error}.")
        else:
            runs.append((run, summarize(run)))
            points.append(point)
    if sweeps and not folders:
        told = f"none of its {len(without)} points has a run yet; a report needs at least one"
        raise UserError(f"{next(iter(sweeps)) / SWEEP}: {told}")
    if not runs:
        raise UserError(
            lacking[0].rstrip(".") if lacking else "no run was named; at least one is needed"
        )
    return several(runs, points, lacking)


def read_runs(paths: Sequence[str | Path]) -> list[tuple[Run, str | None]]:
    """Return the runs of folders that are or hold runs, or are sweeps, with points; what is lacking is a warning."""
    found = gather(unfolded(map(Path, paths)), whole=True)
    for sentence in found.lacking:
        warnings.warn(sentence, stacklevel=3)
    return [(one.run, one.point.name if one.point else None) for one in found.runs]


def unfolded(paths: Iterable[Path]) -> list[Path]:
    """Return each folder once, in place of one that holds runs those."""
    own = ((path, (path / "run.json").exists() or is_sweep(path)) for path in paths)
    return list(
        dict.fromkeys(
            run for path, whole in own for run in (not whole and list_runs(path)) or [path]
        )
    )


def is_sweep(path: Path) -> bool:
    return (path / SWEEP).is_file()


def load_sweep(folder: Path) -> Sweep:
    with convert_read_errors(folder / SWEEP):
        return decode_json(read_file(folder / SWEEP), Sweep)


def runs_of(folder: Path, point: Point) -> tuple[Path, ...]:
    """Return the runs of a point, the oldest first: their names begin with the time."""
    return tuple(list_runs(folder / RUNS / point.id))


def point_of(run: Path) -> Point | None:
    """Return the point that a run measured, told by where it lies; None outside a sweep's folder."""
    place = run.resolve()
    folder = place.parents[2] if len(place.parents) > 2 else place
    if place.parent.parent.name != RUNS or not is_sweep(folder):
        return None
    return next(
        (point for point in load_sweep(folder).points if point.id == place.parent.name), None
    )


class Scaled(MatchedCase):
    """A case at several world sizes, or on several numbers of nodes, by those."""

    def rate(self, ranks: int) -> float | None:
        """Return tokens a second of a step, bytes a second of bus bandwidth, else cases a second."""
        if not (row := self.rows.get(ranks)):
            return None
        known = row.value("busbw" if row.is_communication else "tokens_per_second")
        return known or (1 / row.seconds if row.seconds and not row.is_communication else None)

    def efficiency(self, ranks: int) -> float | None:
        """Return the rate over that of the smallest world, over what is hoped for: for steps as many times, else 1."""
        rate, base = self.rate(ranks), self.rate(min(self.rows))
        hoped = 1.0 if self.first.is_communication else ranks / min(self.rows)
        return rate / base / hoped if rate is not None and base else None


def scaled(rows: Sequence[Row]) -> tuple[Scaled, ...]:
    """Return the cases that ran at two world sizes or more; of one size, the first run's row counts."""
    whole = [row for row in rows if "group" not in row.case.params]
    groups = group_rows(whole, lambda row: row.case, by=lambda row: (row.case.target,))
    found = pivot_rows(groups, lambda row: row.world.size)
    return tuple(Scaled(rows={size: of[0] for size, of in sorted(one.items())}) for one in found)
