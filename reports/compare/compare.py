"""Two runs, series by series: what became slower, what cannot be told, and why. Pure.

A series is a case on a world: the same target, parameters, ranks, nodes, backend and device. Its surroundings are
compared as well: a decisive difference there forbids to blame the code. Series that differ in size alone are a family,
and all that are judged are the whole run, which has a verdict of its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from msgspec import structs

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import encode_json
from parbench.bench.machine.environment import find_differing_values
from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, WorldInfo
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError, pluralize
from parbench.reports.analysis.frame import group_rows
from parbench.reports.analysis.summary import Row, summarize
from parbench.reports.compare.counts import CountComparison, collect_counts, compare_counts
from parbench.reports.compare.environment import (
    Change,
    changes,
    plan_changes,
    shared_params,
    surroundings,
)
from parbench.reports.compare.rule import Called, Effect, Pair, Rule, Whole, effects, judge
from parbench.reports.compare.statistics import Repetitions, simes
from parbench.reports.compare.thresholds import Threshold, fingerprints
from parbench.reports.limits import Judged
from parbench.reports.limits import exit_code as code_of_budgets

Word = Literal[
    "WRONG",
    "CHANGED",
    "SLOWER",
    "FAILED",
    "MISSING",
    "SUSPECT",
    "DRIFT",
    "ENV-CHANGED",
    "INSUFFICIENT",
    "AMBIGUOUS",
    "NEW",
    "FASTER",
    "SAME",
]


class Verdict(NamedTuple):
    """The exit code that a word stands for, what it is in JUnit, nothing where it passes, and its meaning."""

    code: int
    junit: str
    meaning: str


VERDICTS: Mapping[Word, Verdict] = {
    "WRONG": Verdict(1, "error", "a result differs from the reference, so it has no time"),
    "CHANGED": Verdict(
        1, "failure", "what is counted is other than it was, and that was not said to be meant"
    ),
    "SLOWER": Verdict(
        1, "failure", "the interval clears the floor, also among all that is compared"
    ),
    "FAILED": Verdict(4, "error", "it failed or hung in NEW"),
    "MISSING": Verdict(4, "error", "BASE has it and NEW does not"),
    "SUSPECT": Verdict(
        3, "skipped", "one run is slower than runs scatter: the next ones tell whether it lasts"
    ),
    "DRIFT": Verdict(3, "skipped", "it grows from run to run, so that no single one is to blame"),
    "ENV-CHANGED": Verdict(
        3, "skipped", "the surroundings differ, so a change of the time says nothing of the code"
    ),
    "INSUFFICIENT": Verdict(3, "skipped", "too few repetitions to compare"),
    "AMBIGUOUS": Verdict(3, "skipped", "neither a change nor its absence is sure"),
    "NEW": Verdict(0, "skipped", "NEW has it and BASE does not"),
    "FASTER": Verdict(0, "", "as SLOWER, the other way"),
    "SAME": Verdict(0, "", "the interval lies within the floor"),
}
WORST_FIRST = tuple(VERDICTS)
COMPARED: frozenset[Word] = frozenset(get_args(Called))
SCHEMA_VERSION = 1  # of the JSON that commands tell


def count_verdicts(words: Iterable[Word]) -> dict[Word, int]:
    found = Counter(words)
    return {word: found[word] for word in WORST_FIRST if found[word]}


def exit_code(found: Iterable[Word], *, fail_on_unknown: bool = False) -> int:
    """Return the exit code of these verdicts. Undecided ones count only with ``fail_on_unknown``."""
    codes = [VERDICTS[word].code for word in found]
    if not fail_on_unknown:
        codes = [code for code in codes if code != ExitCode.UNDECIDED]
    return combine_exit_codes(codes)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One case on one world in both runs; ``base`` or ``new`` is None where that run does not have it.

    The times are the repetitions' medians by their number; ``measured`` is the floor measured on its machine.
    """

    base: Row | None
    new: Row | None
    word: Word = "AMBIGUOUS"
    reason: str = ""
    effect: Effect | None = None
    base_times: Repetitions = field(default_factory=dict)
    new_times: Repetitions = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    measured: Threshold | None = None

    @property
    def row(self) -> Row:
        row = self.new or self.base
        assert row is not None, "a series is in one run at least"
        return row

    @property
    def case(self) -> Case:
        return self.row.case

    @property
    def size(self) -> int | None:
        return self.row.size_bytes

    @property
    def world(self) -> WorldInfo:
        return self.row.world


@dataclass(frozen=True, kw_only=True)
class Family:
    """Series that differ in size alone, in the order of size; judged together, and named by what they share."""

    series: tuple[Series, ...]

    @property
    def name(self) -> str:
        case = self.series[0].case
        return " ".join(
            [case.name, *(f"{name}={value}" for name, value in shared_params(case).items())]
        )

    @property
    def word(self) -> Word:
        return min((one.word for one in self.series), key=WORST_FIRST.index)

    @property
    def p_value(self) -> float | None:
        """That of no member having moved beyond its floor (Simes), None where no times were compared."""
        compared = [one.effect for one in self.series if one.word in COMPARED]
        known = [found.p_value for found in compared if found and found.p_value is not None]
        return simes(known) if known else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run against another, with all that differs around them, and notes on how verdicts came about.

    ``whole`` is None where fewer than two series were judged; ``counted`` are the series that both runs counted, and
    ``budgets`` those that NEW was asked to keep.
    """

    base: Run
    new: Run
    rule: Rule
    whole: Whole | None
    families: tuple[Family, ...]
    changes: tuple[Change, ...]
    counted: tuple[tuple[Series, CountComparison], ...] = ()
    budgets: tuple[Judged, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[Series, ...]:
        return tuple(one for family in self.families for one in family.series)

    @property
    def counts(self) -> Mapping[Word, int]:
        changed = (one.word for _, found in self.counted for one in found.changes if not one.meant)
        return count_verdicts(chain((one.word for one in self.series), changed))

    def code(self, *, fail_on_unknown: bool = False) -> int:
        """Return ``exit_code`` of the series, the whole run and budgets, and 3 as well where nothing was compared."""
        found: list[Word] = [*self.counts, *([self.whole.word] if self.whole else [])]
        fail_on_unknown = fail_on_unknown or not (self.counted or self.is_timed)
        return code_of_budgets(self.budgets, exit_code(found, fail_on_unknown=fail_on_unknown))

    @property
    def is_timed(self) -> bool:
        return any(one.word in COMPARED for one in self.series)


def compare(
    base: Run,
    new: Run,
    rule: Rule,
    meant: Sequence[str] = (),
    floors: Mapping[str, Threshold] | None = None,
) -> Comparison:
    """Return ``new`` against ``base``; what fits a ``meant`` glob forbids nothing; ``UserError`` if they share none."""
    pairs = [*_pairs(base, new, floors or {})]
    if not any(one.base and one.new for one in pairs):
        told = []
        for name, run in (("BASE", base), ("NEW", new)):
            cases = {record.case.id for record in run.records if record.status != "skipped"}
            world = f"{pluralize(run.info.plan.nproc, 'rank')}, {run.info.plan.backend}, {run.info.plan.device}"
            told.append(
                f"{name} ({run.path}) has {pluralize(len(cases), 'measured case')} on {world}"
            )
        how = "compare runs of the same cases on the same world"
        raise UserError(f"the runs share no series: {', '.join(told)}; {how}")
    whole, families = _judged((_measured(one, base, new, rule, meant) for one in pairs), rule)
    around = (change for family in families for one in family.series for change in one.changes)
    differ = tuple(dict.fromkeys((*around, *plan_changes(base.info.plan, new.info.plan))))
    every = (one for family in families for one in family.series if one.base and one.new)
    counts = ((one, _held(one, meant)) for one in every)
    return Comparison(
        base=base,
        new=new,
        rule=rule,
        whole=whole,
        families=families,
        changes=differ,
        counted=tuple((one, found) for one, found in counts if found.count or found.changes),
    )


def encode_report(whole: Mapping[str, object]) -> str:
    return encode_json({"schema_version": SCHEMA_VERSION, **whole}).decode()


def describe_world(world: WorldInfo) -> str:
    return f"{pluralize(world.size, 'rank')} on {pluralize(world.nodes, 'node')}, {world.backend}, {world.device}"


def pool_runs(runs: Sequence[Run], name: str) -> Run:
    """Return runs as one in the newest's environment: of each case what is on its newest's world, notes say so."""
    if len(runs) == 1:
        return runs[0]
    newest = runs[-1].info
    # of each case the newest record's world, preferably of one that was not skipped; over how many nodes it ran only a
    # record that was measured knows
    every = [record for run in runs for record in run.records]
    by_worth = (*every, *(record for record in every if record.status != "skipped"))
    worlds = {record.case.id: record.world for record in by_worth}
    sure = [record for record in every if record.status == "ok"]
    worlds |= {
        one.case.id: one.world for one in sure if _ranks(one.world) == _ranks(worlds[one.case.id])
    }
    records, left_out, repetitions = list[Record](), list[Record](), 0
    for run in runs:
        own: list[Record] = []
        for record in run.records:
            world = worlds[record.case.id]
            fits = record.world == world or (
                record.status != "ok" and _ranks(record.world) == _ranks(world)
            )
            (own if fits else left_out).append(record)
        if run.records and not own:
            continue
        common = find_differing_values(newest.environment or {}, run.info.environment or {})
        for record in own:
            changed = {**common, **(record.environment.get("changed") or {})}
            environment = {**record.environment, **({"changed": changed} if changed else {})}
            records.append(
                structs.replace(
                    record, repetition=repetitions + record.repetition, environment=environment
                )
            )
        repetitions += max([run.info.plan.repetitions, *(record.repetition + 1 for record in own)])
    cases = {case.id: case for run in runs for case in run.info.plan.cases}
    exclusions: tuple[str, ...] = ()
    if left_out:
        told = "; ".join(dict.fromkeys(describe_world(record.world) for record in left_out))
        count = pluralize(len(left_out), "record")
        exclusions = (
            f"Left out of {name}: {count} on another world than the newest of their case, {told}.",
        )
    skipped = tuple(one for one in newest.plan.skipped if one.case.id not in cases)
    plan = structs.replace(
        newest.plan, cases=tuple(cases.values()), skipped=skipped, repetitions=repetitions
    )
    info = structs.replace(newest, id=name, plan=plan)
    return Run(path=Path(name), info=info, records=tuple(records), exclusions=exclusions)


def notes_of_pools(runs: Sequence[Run]) -> tuple[str, ...]:
    return tuple(sentence for run in runs for sentence in run.exclusions)


def _ranks(world: WorldInfo) -> tuple[int, str, str]:
    return world.size, world.backend, world.device


def _pairs(base: Run, new: Run, floors: Mapping[str, Threshold]) -> Iterator[Series]:
    """Yield the series of both runs, base's first, each with the higher of its floors that were measured."""
    ours, theirs = (
        {
            row.case.id: row
            for row in summarize(run).rows
            if row.repetitions or row.status != "skipped"
        }
        for run in (base, new)
    )
    names = [
        fingerprints(run, rows.values()) for run, rows in ((base, ours), (new, theirs)) if floors
    ]
    for case_id in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(case_id), theirs.get(case_id)
        found = [floors[side[case_id]] for side in names if side.get(case_id) in floors]
        measured = max(found, key=lambda floor: floor.floor, default=None)
        alike = one and other and _ranks(one.world) == _ranks(other.world)
        # over how many nodes is not known of what was not measured
        if (
            one
            and other
            and alike
            and (
                one.world.nodes == other.world.nodes or not (one.repetitions and other.repetitions)
            )
        ):
            yield Series(base=one, new=other, measured=measured)
            continue
        if one:
            yield Series(
                base=one,
                new=None,
                word="MISSING",
                reason=_why_missing(one, other, new),
                measured=measured,
            )
        if other:
            why = "not in BASE, or not on this world"
            yield Series(base=None, new=other, word="NEW", reason=why, measured=measured)


def _why_missing(base: Row, new: Row | None, run: Run) -> str:
    if new is not None:
        return f"NEW ran it on another world: {describe_world(base.world)} -> {describe_world(new.world)}"
    skipped = [one.reason for one in run.info.plan.skipped if one.case.id == base.case.id]
    skipped += [record.reason for record in run.records if record.case.id == base.case.id]
    if skipped:
        return f"skipped in NEW: {skipped[0]}"
    planned = any(case.id == base.case.id for case in run.info.plan.cases)
    return "planned in NEW, but without a record" if planned else "not in the plan of NEW"


def _measured(one: Series, base: Run, new: Run, rule: Rule, meant: Sequence[str]) -> Series:
    if one.new is not None and one.new.status in ("wrong", "failed", "hang"):
        word: Word = "WRONG" if one.new.status == "wrong" else "FAILED"
        return replace(one, word=word, reason="; ".join(one.new.reasons) or one.new.status)
    if one.base is None or one.new is None:
        return one
    # a wrong result has no time
    ours, theirs = (
        row.by_repetition(row.headline) if row.status != "wrong" else {}
        for row in (one.base, one.new)
    )
    both = (
        one.base.measured and one.new.measured
    )  # what was not measured saw nothing: that is no difference
    found = (
        changes(surroundings(base, one.base.measured), surroundings(new, one.new.measured), meant)
        if both
        else ()
    )
    one = replace(one, base_times=ours, new_times=theirs, changes=found)
    decisive = [change.text for change in found if change.decisive]
    if ours and theirs and decisive:
        more = [f"and {len(decisive) - 3} more"] if len(decisive) > 3 else []
        return replace(one, word="ENV-CHANGED", reason="; ".join([*decisive[:3], *more]))
    if min(len(ours), len(theirs)) < rule.min_repetitions:
        bad = f" (in BASE it is {one.base.status})" if one.base and one.base.status != "ok" else ""
        had = f"BASE has {len(ours)}, NEW has {len(theirs)}{bad}"
        needed = f"at least {rule.min_repetitions} repetitions a side are needed"
        return replace(one, word="INSUFFICIENT", reason=f"{needed}: {had}")
    return one


def _held(one: Series, meant: Sequence[str]) -> CountComparison:
    base, new = (collect_counts(row) if row else {} for row in (one.base, one.new))
    return compare_counts(
        base, new, meant, other_torch=any(change.path == "versions.torch" for change in one.changes)
    )


def _judged(found: Iterable[Series], rule: Rule) -> tuple[Whole | None, tuple[Family, ...]]:
    """Return the families with all verdicts; what the statistics are to tell is judged over all families at once."""
    groups = group_rows(
        found,
        lambda one: one.case,
        without=["size_bytes"],
        by=lambda one: (one.case.target, *_ranks(one.world)),
    )
    families = [sorted(group, key=lambda one: one.size or 0) for group in groups]

    def told(judged: bool) -> tuple[Whole | None, Iterator[Effect], list[tuple[Effect, ...]]]:
        timed = [[one for one in family if one.base_times and one.new_times] for family in families]
        chosen = [
            [_pair(one) for one in family if (one.word == "AMBIGUOUS") == judged]
            for family in timed
        ]
        whole, each = effects([pairs for pairs in chosen if pairs], rule)
        return whole, chain.from_iterable(each), [*each]

    whole, judged, of_families = told(True)
    _, others, _ = told(False)
    judgements = chain.from_iterable(judge(of_families, rule))

    def decided(one: Series) -> Series:
        if not one.base_times or not one.new_times:
            return one
        if one.word != "AMBIGUOUS":
            return replace(one, effect=next(others))
        found = next(judgements)
        return replace(one, word=found.word, reason=found.reason, effect=next(judged))

    return whole, tuple(Family(series=tuple(map(decided, family))) for family in families)


def _pair(one: Series) -> Pair:
    return Pair(
        base=one.base_times, new=one.new_times, measured=one.measured.floor if one.measured else 0.0
    )
