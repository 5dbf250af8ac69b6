"""Several runs beside each other: in what they differ, and the rows that answer the same question. Pure."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from bench.results.metrics import MetricValue
from bench.results.runs import Run, load_run
from bench.results.stats import Estimate, ratio_within_launch
from bench.text import UserError, reading
from reports.analysis.labels import PAIRS, environment_facts, flatten
from reports.analysis.rank_hosts import Nodes, nodes_of
from reports.analysis.summary import Row, Summary, summarize


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What a report needs of a sweep's point; ``environment`` is empty where the sweep compares none."""

    id: str
    label: str = ""
    placement: str = ""
    environment: str = ""

    @property
    def name(self) -> str:
        """Its label, or its id where it has none."""
        return self.label or self.id


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What a report needs of a sweep: its points in the order in which they run."""

    name: str = ""
    points: tuple[Point, ...] = ()


DID_NOT_RUN = 4
_OF_PLAN = ("preset", "nproc", "backend", "device", "launches")
# what differs between any two runs and says nothing of either, and what does but may explain their times
_OF_EVERY_RUN, _CIRCUMSTANCES = ("boot_id", "job", "SLURM_JOB_ID"), ("one_minute", "nodelist", "SLURM_JOB_NODELIST")


@dataclass(frozen=True, kw_only=True)
class One:
    """A run with its summary, the number by which tables call it, and the point of a sweep that it measured."""

    number: int
    run: Run
    summary: Summary
    point: Point | None = None

    @cached_property
    def nodes(self) -> Nodes | None:
        """Where its ranks ran, None where all are on one host or the run does not tell."""
        return nodes_of(self.run)

    @property
    def num_nodes(self) -> int:
        """How many nodes its ranks were on, or were to be on where they never started."""
        spread = self.run.info.plan.spread
        return max([row.world.nodes for row in self.summary.rows] + [spread.nodes if spread else 1])

    @property
    def name(self) -> str:
        """What columns call it."""
        return f"run {self.number}"

    @property
    def shown(self) -> tuple[Row, ...]:
        """The rows with a valid measurement."""
        return tuple(row for row in self.summary.rows if row.metrics)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that is not the same in all runs, with each run's text."""

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A case in the runs that measured it, by the runs' numbers."""

    rows: Mapping[int, Row]

    @property
    def first(self) -> Row:
        """The row of the first run that has it."""
        return self.rows[min(self.rows)]

    def ratio(self, number: int) -> MetricValue | None:
        """Return a run's time over the first's with its interval, None if either is unknown."""
        one, other = (_estimate(self.rows.get(of)) for of in (number, min(self.rows)))
        if one is None or other is None:
            return None
        found = ratio_within_launch(one, other)
        return MetricValue(value=found.value, unit="", better="lower", low=found.low, high=found.high)


@dataclass(frozen=True, kw_only=True)
class Several:
    """Runs in the order in which they were given, and in what they differ.

    ``lacking`` are sentences on what should be here and is not, such as a point of a sweep without a run.
    """

    runs: tuple[One, ...]
    differences: tuple[Difference, ...]
    lacking: tuple[str, ...] = ()

    @property
    def counting(self) -> tuple[One, ...]:
        """The runs without those of a point that ran again later: its last run decides."""
        last = {one.point.id: one.number for one in self.runs if one.point}
        return tuple(one for one in self.runs if not one.point or last[one.point.id] == one.number)

    @property
    def fine(self) -> bool:
        """Whether every run that counts is, and nothing is lacking."""
        return all(one.summary.verdict.fine for one in self.counting) and not self.lacking

    @property
    def code(self) -> int:
        """The exit code: 1 if a result is wrong, else 4 if something did not run, else 0."""
        codes = {one.summary.verdict.code for one in self.counting}
        return 1 if 1 in codes else DID_NOT_RUN if codes != {0} or self.lacking else 0

    @property
    def verdict_words(self) -> str:
        """Which runs are fine, and which are not."""
        bad = [one.number for one in self.counting if not one.summary.verdict.fine]
        lacking = f"; {len(self.lacking)} more that should be here {_are(self.lacking)} not" if self.lacking else ""
        if bad:
            return f"not fine: {', '.join(f'run {number}' for number in bad)} of {len(self.runs)}{lacking}"
        counted = f"all {len(self.runs)} runs" if len(self.runs) != 1 else "the one run"
        return f"{'not complete, else ' * bool(lacking)}fine: {counted}{lacking}"

    @property
    def words(self) -> str:
        """In what the runs differ, as a sentence."""
        asked = [one for one in self.differences if not _is_circumstance(one.name)]
        if not asked:
            return "They differ in nothing but circumstances: what their times differ by is those, or chance."
        if len(asked) == 1:
            return f"They differ in one thing, {asked[0].name}: {', '.join(asked[0].texts)}."
        return f"They differ in {len(asked)} things, so no one of them explains what their times differ by."


def several(
    runs: Sequence[tuple[Run, Summary]], points: Sequence[Point | None] = (), lacking: Sequence[str] = ()
) -> Several:
    """Return the runs, numbered from 1, with their differences; ``points`` are those that they measured, if any."""
    known = (*points, *([None] * (len(runs) - len(points))))
    ones = tuple(
        One(number=i, run=run, summary=summary, point=point)
        for i, ((run, summary), point) in enumerate(zip(runs, known, strict=True), start=1)
    )
    facts = [dict(_facts(one.run)) for one in ones]
    names = dict.fromkeys(name for one in facts for name in one)
    told = [(name, tuple(one.get(name, "-") for one in facts)) for name in names]
    told += [(f"{case} {name}", texts) for (case, name), texts in _varying(ones).items()]
    different = (Difference(name=name, texts=texts) for name, texts in told if len(set(texts)) > 1)
    return Several(runs=ones, differences=tuple(different), lacking=tuple(lacking))


def beside(several: Several) -> tuple[Beside, ...]:
    """Return each case that two runs or more measured, matched without the parameters in which the runs differ."""
    varying = _varying(several.runs)
    found: dict[object, dict[int, Row]] = {}
    for one in several.runs:
        for row in one.shown:
            found.setdefault(_identity(row, varying), {})[one.number] = row
    return tuple(Beside(rows=rows) for rows in found.values() if len(rows) > 1)


def _facts(run: Run) -> list[tuple[str, str]]:
    info = run.info
    plan: dict[str, Any] = {name: getattr(info.plan, name) for name in _OF_PLAN}
    environment = ((f"environment.{name}", text) for name, text in environment_facts(info.environment or {}))
    facts = [*flatten({"plan": plan, "host": info.host, "parbench": info.parbench}), *environment]
    return [fact for fact in facts if fact[0].rpartition(".")[2] not in _OF_EVERY_RUN]


def _are(told: Sequence[str]) -> str:
    return "is" if len(told) == 1 else "are"


def _is_circumstance(name: str) -> bool:
    """Say whether a difference was not asked for, or follows from the number of ranks."""
    last = name.rpartition(".")[2]
    return last in _CIRCUMSTANCES or last.startswith(PAIRS)


def _varying(runs: Sequence[One]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return by case name and parameter each run's value, where every run has one value throughout and they differ."""
    values: dict[tuple[str, str], list[set[str]]] = {}
    for one in runs:
        for row in one.summary.rows:
            for name, value in row.case.params.items():
                sets = values.setdefault((row.case.name, name), [set() for _ in runs])
                sets[one.number - 1].add(str(value))
    found = {key: sets for key, sets in values.items() if all(len(one) == 1 for one in sets)}
    told = {key: tuple(next(iter(one)) for one in sets) for key, sets in found.items()}
    return {key: texts for key, texts in told.items() if len(set(texts)) > 1}


def _identity(row: Row, varying: Mapping[tuple[str, str], object]) -> object:
    kept = {name: value for name, value in row.case.params.items() if (row.case.name, name) not in varying}
    return row.case.name, tuple(sorted(kept.items(), key=lambda one: one[0]))


def _estimate(row: Row | None) -> Estimate | None:
    metric = row.metrics.get(row.headline) if row is not None else None
    if metric is None or not metric.value:
        return None
    return Estimate(value=metric.value, low=metric.low, high=metric.high, method=metric.method)


def gather(paths: Sequence[Path], *, whole: bool = False) -> Several:
    """Return the runs in these folders, a sweep's in the order of its points.

    ``UserError`` where a folder is neither a run nor a sweep, or where there is no run at all; a run of a sweep that
    cannot be read, or any run unless ``whole``, is told in what is lacking.
    """
    found, lacking = [], []
    for path in paths:
        if is_sweep(path):
            lacking += _points_without_run(path)
    for path, point, must in _folders(paths, whole):
        try:
            run = load_run(path)
        except UserError as error:
            if must:
                raise
            lacking.append(f"A run cannot be read: {error}.")
            continue
        found.append((run, summarize(run), point))
    if not found:
        raise UserError(_nothing(paths, lacking))
    return several([(run, summary) for run, summary, _ in found], [point for *_, point in found], lacking)


def read_runs(paths: Sequence[str | Path]) -> list[tuple[Run, str | None]]:
    """Return the runs of these folders, each a run's, a sweep's, or one that holds runs; in a sweep also the point.

    ``UserError`` where one is none of them; what is lacking in a sweep is a warning.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        inside = [] if (path / "run.json").exists() or is_sweep(path) else sorted(path.glob("*/run.json"))
        folders |= dict.fromkeys([file.parent for file in inside] or [path])
    found = gather(list(folders), whole=True)
    for sentence in found.lacking:
        warnings.warn(sentence, stacklevel=3)
    return [(one.run, one.point.name if one.point else None) for one in found.runs]


def _folders(paths: Sequence[Path], whole: bool) -> Iterator[tuple[Path, Point | None, bool]]:
    """Yield each run's folder with its point, and whether it must be readable."""
    for path in paths:
        if not is_sweep(path):
            yield path, point_of(path), whole
            continue
        for point in load_sweep(path).points:
            yield from ((run, point, False) for run in runs_of(path, point))


def _points_without_run(folder: Path) -> list[str]:
    return [f"Not run: {point.name}." for point in load_sweep(folder).points if not runs_of(folder, point)]


def _nothing(paths: Sequence[Path], lacking: Sequence[str]) -> str:
    sweeps = [path for path in paths if is_sweep(path)]
    if sweeps and not any("cannot be read" in one for one in lacking):
        return f"{sweeps[0] / SWEEP}: none of its {len(lacking)} points has a run yet; a report needs at least one"
    return lacking[0].rstrip(".") if lacking else "no run was named; at least one is needed"


SWEEP, RUNS = "sweep.json", "runs"


def is_sweep(path: Path) -> bool:
    """Say whether a folder is a sweep's."""
    return (path / SWEEP).is_file()


def load_sweep(folder: Path) -> Sweep:
    """Return the sweep of a folder; ``UserError`` if its file is not what parbench wrote."""
    file = folder / SWEEP
    with reading(file):
        return msgspec.json.decode(file.read_bytes(), type=Sweep)


def runs_of(folder: Path, point: Point) -> tuple[Path, ...]:
    """Return the runs of a point, the oldest first: their names begin with the time."""
    return tuple(sorted(file.parent for file in (folder / RUNS / point.id).glob("*/run.json")))


def point_of(run: Path) -> Point | None:
    """Return the point that a run measured, told by where it lies; None outside a sweep's folder."""
    place = run.resolve()
    folder = place.parents[2] if len(place.parents) > 2 else place
    if place.parent.parent.name != RUNS or not is_sweep(folder):
        return None
    return next((point for point in load_sweep(folder).points if point.id == place.parent.name), None)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A case at several world sizes."""

    rows: Mapping[int, Row]

    @property
    def first(self) -> Row:
        """The row of the smallest world."""
        return self.rows[min(self.rows)]

    def rate(self, ranks: int) -> float | None:
        """Return tokens a second of a step, bytes a second of bus bandwidth, else cases a second."""
        row = self.rows.get(ranks)
        if row is None:
            return None
        known = row.value("busbw" if row.is_communication else "tokens_per_second")
        seconds = row.value(row.headline)
        return known or (1 / seconds if seconds and not row.is_communication else None)

    def speed_up(self, ranks: int) -> float | None:
        """Return the rate over that of the smallest world."""
        rate, base = self.rate(ranks), self.rate(min(self.rows))
        return rate / base if rate is not None and base else None

    def efficiency(self, ranks: int) -> float | None:
        """Return the speed-up over what is hoped for: as many times the rate for steps, the same busbw."""
        found = self.speed_up(ranks)
        hoped = 1.0 if self.first.is_communication else ranks / min(self.rows)
        return None if found is None else found / hoped


def scaled(rows: Sequence[Row]) -> tuple[Scaled, ...]:
    """Return the cases that ran at two world sizes or more; of one size, the first run's row counts."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if "group" not in row.case.params:
            found.setdefault(row.case.id, {}).setdefault(row.world.size, row)
    return tuple(Scaled(rows=of) for of in found.values() if len(of) > 1)


def worlds(cases: Sequence[Scaled]) -> tuple[int, ...]:
    """Return every world size of any case, the smallest first."""
    return tuple(sorted({ranks for one in cases for ranks in one.rows}))
