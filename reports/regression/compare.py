"""Two runs, series by series: what became slower, what cannot be told, and why. Pure.

A series is a case on a world: the same target, parameters, ranks, nodes, backend and device. Its surroundings are
compared as well: a decisive difference there forbids to blame the code. Series that differ in size alone are a family.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from bench.plan.cases import Case
from bench.plan.params import Value
from bench.results.records import WorldInfo
from bench.results.runs import Run
from bench.text import UserError
from reports.analysis.summary import Row, summarize
from reports.regression.environment import Change, changes, plan_changes, surroundings
from reports.regression.noise_floor import Floor, fingerprints
from reports.regression.rule import Effect, Judgement, Rule, effect, judge
from reports.regression.statistics import simes

Word = Literal[
    "WRONG", "SLOWER", "FAILED", "MISSING", "ENV-CHANGED", "INSUFFICIENT", "AMBIGUOUS", "NEW", "FASTER", "SAME"
]
WORST_FIRST: tuple[Word, ...] = get_args(Word)
BAD: frozenset[Word] = frozenset({"WRONG", "SLOWER"})
DID_NOT_RUN: frozenset[Word] = frozenset({"FAILED", "MISSING"})
UNKNOWN: frozenset[Word] = frozenset({"ENV-CHANGED", "INSUFFICIENT", "AMBIGUOUS"})


def counts_of(words: Iterable[Word]) -> dict[Word, int]:
    """Return how many have each verdict, the worst first."""
    found = Counter(words)
    return {word: found[word] for word in WORST_FIRST if found[word]}


def exit_code(found: Iterable[Word], *, fail_on_unknown: bool = False) -> int:
    """Return 1 if any is slower or wrong, else 4 if failed or missing, else 3 if unknown and asked for, else 0."""
    words = set(found)
    if words & BAD:
        return 1
    if words & DID_NOT_RUN:
        return 4
    return 3 if fail_on_unknown and words & UNKNOWN else 0


_SHOWN_CHANGES = 3


@dataclass(frozen=True, kw_only=True)
class Series:
    """One case on one world in both runs; ``base`` or ``new`` is None where that run does not have it.

    ``base_seconds`` and ``new_seconds`` are the launches' medians in the order of launches; ``changes`` are those of
    the series' own surroundings; ``measured`` is the floor that its machine was measured to need.
    """

    base: Row | None
    new: Row | None
    word: Word
    reason: str = ""
    effect: Effect | None = None
    base_seconds: tuple[float, ...] = ()
    new_seconds: tuple[float, ...] = ()
    changes: tuple[Change, ...] = ()
    measured: Floor | None = None

    @property
    def row(self) -> Row:
        """The row of the newer run that has one."""
        return _row(self.base, self.new)

    @property
    def case(self) -> Case:
        """What was measured."""
        return self.row.case

    @property
    def world(self) -> WorldInfo:
        """The ranks it was measured on."""
        return self.row.world


@dataclass(frozen=True, kw_only=True)
class Family:
    """Series that differ in size alone, in the order of size; judged together."""

    series: tuple[Series, ...]

    @property
    def name(self) -> str:
        """The case's name with the parameters that all members share."""
        case = self.series[0].case
        return " ".join([case.name, *(f"{name}={value}" for name, value in _shared_params(case).items())])

    @property
    def word(self) -> Word:
        """The worst of its members' verdicts."""
        return min((one.word for one in self.series), key=WORST_FIRST.index)

    @property
    def judged(self) -> tuple[Series, ...]:
        """The members whose times were compared."""
        return tuple(one for one in self.series if one.word in ("SLOWER", "FASTER", "SAME", "AMBIGUOUS"))

    @property
    def p_value(self) -> float | None:
        """That of no member having moved beyond its floor (Simes), None where none was compared."""
        known = [one.effect.p_value for one in self.judged if one.effect and one.effect.p_value is not None]
        return simes(known) if known else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run against another; ``changes`` is all that differs around them, that of single series included.

    ``notes`` are sentences on how single verdicts came about.
    """

    base: Run
    new: Run
    rule: Rule
    families: tuple[Family, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[Series, ...]:
        """All series, family by family."""
        return tuple(one for family in self.families for one in family.series)

    @property
    def counts(self) -> Mapping[Word, int]:
        """How many series have each verdict, the worst first."""
        return counts_of(one.word for one in self.series)

    def code(self, *, fail_on_unknown: bool = False) -> int:
        """Return the exit code of these verdicts."""
        return exit_code(self.counts, fail_on_unknown=fail_on_unknown)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A series on its way; ``word`` is None while only the statistics can tell."""

    base: Row | None
    new: Row | None
    word: Word | None = None
    reason: str = ""
    effect: Effect | None = None
    base_seconds: tuple[float, ...] = ()
    new_seconds: tuple[float, ...] = ()
    changes: tuple[Change, ...] = ()
    measured: Floor | None = None

    def decided(self, word: Word, reason: str) -> Series:
        """Return the series with its verdict."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return Series(**{**known, "word": word, "reason": reason})


def compare(
    base: Run, new: Run, rule: Rule, meant: Sequence[str] = (), floors: Mapping[str, Floor] | None = None
) -> Comparison:
    """Return ``new`` against ``base``; ``UserError`` if they share no series.

    Differences of the environment whose paths fit a glob of ``meant`` are what is being tested, and forbid nothing.
    ``floors`` are those that machines were measured to need, by the fingerprints of series.
    """
    pairs = _with_floors(_pair(base, new), base, new, floors or {})
    if not any(one.base and one.new for one in pairs):
        raise UserError(_no_shared_series(base, new))
    families = _judge(_families([_compare(one, base, new, rule, meant) for one in pairs]), rule)
    around = (change for family in families for one in family.series for change in one.changes)
    return Comparison(
        base=base,
        new=new,
        rule=rule,
        families=families,
        changes=tuple(dict.fromkeys((*around, *plan_changes(base.info.plan, new.info.plan)))),
    )


def world_words(world: WorldInfo) -> str:
    """Return a world in words: ``4 ranks on 1 node, gloo, cpu``."""
    ranks, nodes = f"{world.size} rank{'s' * (world.size != 1)}", f"{world.nodes} node{'s' * (world.nodes != 1)}"
    return f"{ranks} on {nodes}, {world.backend}, {world.device}"


def _row(base: Row | None, new: Row | None) -> Row:
    row = new or base
    assert row is not None, "a series is in one run at least"
    return row


def _pair(base: Run, new: Run) -> list[_Candidate]:
    """Return the series of both runs, those of base first; what was skipped in all launches is in neither."""
    ours, theirs = (
        {row.case.id: row for row in summarize(run).rows if row.launches or row.status != "skipped"}
        for run in (base, new)
    )
    found = []
    for case_id in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(case_id), theirs.get(case_id)
        if one and other and _same_world(one.world, other.world, measured=bool(one.launches and other.launches)):
            found.append(_Candidate(base=one, new=other))
            continue
        if one:
            found.append(_Candidate(base=one, new=None, word="MISSING", reason=_why_missing(one, other, new)))
        if other:
            found.append(_Candidate(base=None, new=other, word="NEW", reason="not in BASE, or not on this world"))
    return found


def _with_floors(pairs: Sequence[_Candidate], base: Run, new: Run, floors: Mapping[str, Floor]) -> Sequence[_Candidate]:
    """Return the pairs with the floors measured where either run was; the higher where both were."""
    if not floors:
        return pairs
    names = [fingerprints(run) for run in (base, new)]
    return [
        replace(one, measured=_highest(floors.get(side.get(_row(one.base, one.new).case.id, "")) for side in names))
        for one in pairs
    ]


def _highest(found: Iterable[Floor | None]) -> Floor | None:
    return max((one for one in found if one is not None), key=lambda one: one.floor, default=None)


def _same_world(one: WorldInfo, other: WorldInfo, *, measured: bool) -> bool:
    """Say whether two rows ran on alike ranks; over how many nodes is not known of what was not measured."""
    alike = (one.size, one.backend, one.device) == (other.size, other.backend, other.device)
    return alike and (one.nodes == other.nodes or not measured)


def _why_missing(base: Row, new: Row | None, run: Run) -> str:
    if new is not None:
        return f"NEW ran it on another world: {world_words(base.world)} -> {world_words(new.world)}"
    skipped = [one.reason for one in run.info.plan.skipped if one.case.id == base.case.id]
    skipped += [record.reason for record in run.records if record.case.id == base.case.id]
    if skipped:
        return f"skipped in NEW: {skipped[0]}"
    planned = any(case.id == base.case.id for case in run.info.plan.cases)
    return "planned in NEW, but without a record" if planned else "not in the plan of NEW"


def _no_shared_series(base: Run, new: Run) -> str:
    told = []
    for name, run in (("BASE", base), ("NEW", new)):
        plan = run.info.plan
        cases = len({record.case.id for record in run.records if record.status != "skipped"})
        world = f"{plan.nproc} rank{'s' * (plan.nproc != 1)}, {plan.backend}, {plan.device}"
        told.append(f"{name} ({run.path}) has {cases} measured case{'s' * (cases != 1)} on {world}")
    return f"the runs share no series: {', '.join(told)}; compare runs of the same cases on the same world"


def _compare(one: _Candidate, base: Run, new: Run, rule: Rule, meant: Sequence[str]) -> _Candidate:
    """Return a pair with its times, its effect, and the verdict where it needs no statistics."""
    if one.new is not None and one.new.status in ("wrong", "failed", "hang"):
        word: Word = "WRONG" if one.new.status == "wrong" else "FAILED"
        return replace(one, word=word, reason="; ".join(one.new.reasons) or one.new.status)
    if one.base is None or one.new is None:
        return one
    sides = _seconds(one.base), _seconds(one.new)
    both = one.base.measured and one.new.measured  # what was not measured saw nothing: that is no difference
    found = changes(surroundings(base, one.base.measured), surroundings(new, one.new.measured), meant) if both else ()
    measured = replace(one, base_seconds=sides[0], new_seconds=sides[1], changes=found)
    if all(sides):
        floor = one.measured.floor if one.measured else 0.0
        measured = replace(measured, effect=effect(*sides, rule, floor))
    decisive = [change for change in found if change.decisive]
    if decisive and all(sides):
        return replace(measured, word="ENV-CHANGED", reason=_told(decisive))
    if min(map(len, sides)) < rule.min_launches:
        return replace(measured, word="INSUFFICIENT", reason=_too_few(measured, rule))
    return measured


def _seconds(row: Row) -> tuple[float, ...]:
    """Return the median of each launch, in their order; a wrong result has no time."""
    if row.status == "wrong":
        return ()
    ordered = sorted(row.measured, key=lambda record: record.launch)
    metrics = [record.metrics.get(row.headline) for record in ordered]
    return tuple(metric.value for metric in metrics if metric and metric.value is not None and metric.value > 0)


def _told(decisive: Sequence[Change]) -> str:
    shown = [change.text for change in decisive[:_SHOWN_CHANGES]]
    more = len(decisive) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)


def _too_few(one: _Candidate, rule: Rule) -> str:
    had = f"BASE has {len(one.base_seconds)}, NEW has {len(one.new_seconds)}"
    bad = f" (in BASE it is {one.base.status})" if one.base and one.base.status != "ok" else ""
    return f"at least {rule.min_launches} launches a side are needed: {had}{bad}"


def _families(found: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Return what differs in size alone together, in the order of size."""
    groups: dict[object, list[_Candidate]] = {}
    for one in found:
        row = _row(one.base, one.new)
        params = _shared_params(row.case).items()
        key = (row.case.name, row.case.target, tuple(params), row.world.size, row.world.backend, row.world.device)
        groups.setdefault(key, []).append(one)
    return [sorted(group, key=_size) for group in groups.values()]


def _shared_params(case: Case) -> dict[str, Value]:
    return {name: value for name, value in case.params.items() if name != "size_bytes"}


def _size(one: _Candidate) -> float:
    size = _row(one.base, one.new).case.params.get("size_bytes")
    return size if isinstance(size, int | float) else 0


def _judge(families: Sequence[Sequence[_Candidate]], rule: Rule) -> tuple[Family, ...]:
    """Return the families with all verdicts; what the statistics are to tell is judged over all families at once."""
    open_ones = [[one.effect for one in family if one.word is None and one.effect] for family in families]
    judged = iter(judge([effects for effects in open_ones if effects], rule))
    whole = []
    for family, effects in zip(families, open_ones, strict=True):
        verdicts = iter(next(judged) if effects else ())
        whole.append(Family(series=tuple(_decided(one, verdicts) for one in family)))
    return tuple(whole)


def _decided(one: _Candidate, verdicts: Iterator[Judgement]) -> Series:
    if one.word is not None:
        return one.decided(one.word, one.reason)
    found = next(verdicts)
    return one.decided(found.word, found.reason)
