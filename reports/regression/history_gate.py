"""The nightly gate: each series of a run against what the history tells of it. Pure but for reading the history."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from bench.plan.cases import Case
from bench.results.records import WorldInfo
from bench.text import UserError
from reports import cells
from reports.regression.compare import Word, counts_of, exit_code
from reports.regression.history import Annotation, History, Line, Value
from reports.regression.history_entry import Identity
from reports.regression.noise_floor import Floor
from reports.regression.statistics import Shift, StepRule, discoveries_in_families, newest_shift

FALSE_DISCOVERY_RATE = 0.05
MISSED_RUNS = 3
"""A case is missing as long as one of so many runs before, of those that share a case with this one, has it."""
_Asked = tuple[str, int, str, str]
_STATUS_WORDS: Mapping[str, Word] = {"wrong": "WRONG", "failed": "FAILED", "hang": "FAILED"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the gate says of a series; ``times`` are its window, ``differs`` what was beside it before and after a step.

    ``since`` is the run at which its newest level began, None where nothing changed; ``measured`` is the floor that its
    machine was measured to need, None where none was.
    """

    case: Case
    world: WorldInfo
    word: Word
    reason: str = ""
    times: tuple[float, ...] = ()
    shift: Shift | None = None
    since: Line | None = None
    differs: tuple[str, ...] = ()
    measured: Floor | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """All findings of a run."""

    line: Line
    rule: StepRule
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> Mapping[Word, int]:
        """How many series have each verdict, the worst first."""
        return counts_of(one.word for one in self.findings)

    def code(self, *, fail_on_unknown: bool = False) -> int:
        """Return the exit code of these verdicts."""
        return exit_code(self.counts, fail_on_unknown=fail_on_unknown)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    number: int
    identity: Identity
    value: Value
    times: tuple[tuple[Line, float], ...]
    shift: Shift | None
    measured: Floor | None


def check(history: History, line: Line, rule: StepRule, floors: Mapping[str, Floor] | None = None) -> Check:
    """Return what the branch's runs up to ``line`` tell of it.

    A series counts from its newest annotation on. Steps are judged among all series at once, a size curve as a family.
    A case is missing if one of the last three runs that share a case on its world with this one has it.
    ``floors`` are those that machines were measured to need, by the fingerprints of series; they raise the rule's.
    """
    known = floors or {}
    before = _until(history.runs(line.branch), line)
    ours = history.points_of_run(line.number)
    identities = history.series(ours)
    annotations = [one for one in history.annotations() if one.branch == line.branch and one.started <= line.started]
    candidates = [
        _Candidate(
            number=number,
            identity=identities[number],
            value=value,
            times=(times := _window(history, number, before, _start(identities[number], annotations), rule)),
            measured=(measured := known.get(identities[number].fingerprint)),
            shift=newest_shift([seconds for _, seconds in times], _with_floor(rule, measured)),
        )
        for number, value in ours.items()
    ]
    alike = [one for one in before.values() if one.preset == line.preset and one.number != line.number]
    asked = {_asked(one.identity) for one in candidates}
    kin = _kin(history, alike[-rule.window :], asked)
    old = kin[0] if kin else _series_of(history, alike[-1]) if alike else ()
    sure = _sure(candidates)
    findings = [_finding(history, one, one.identity.fingerprint in sure, old, rule) for one in candidates]
    return Check(line=line, rule=rule, findings=(*findings, *_missing(kin, asked)))


def newest(history: History, branch: str) -> Line:
    """Return the newest run of a branch; ``UserError`` if it has none."""
    found = history.runs(branch)
    if not found:
        branches = sorted({line.branch for line in history.runs()})
        raise UserError(f"the history has no run of branch {branch!r}: it has {', '.join(branches) or 'no run at all'}")
    return found[-1]


def _with_floor(rule: StepRule, measured: Floor | None) -> StepRule:
    return replace(rule, floor=max(rule.floor, measured.floor)) if measured else rule


def _until(lines: Iterable[Line], last: Line) -> dict[int, Line]:
    return {one.number: one for one in lines if (one.started, one.number) <= (last.started, last.number)}


def _start(identity: Identity, annotations: Sequence[Annotation]) -> str:
    """Return when the newest annotated change of a series was, or an empty text, which is before all times."""
    return max((one.started for one in annotations if fnmatchcase(identity.case.label, one.series)), default="")


def _window(
    history: History, series: int, lines: Mapping[int, Line], start: str, rule: StepRule
) -> tuple[tuple[Line, float], ...]:
    times = [(lines[run], seconds) for run, seconds in history.times_of_series(series) if run in lines]
    times.sort(key=lambda pair: (pair[0].started, pair[0].number))
    return tuple(pair for pair in times if pair[0].started >= start)[-rule.window :]


def _kin(history: History, lines: Sequence[Line], ours: Set[_Asked]) -> list[tuple[Identity, ...]]:
    """Return the series of the last few runs of this kind, the newest first: those that share a case on its world.

    A run without any case is of every kind.
    """
    found: list[tuple[Identity, ...]] = []
    for line in reversed(lines):
        series = _series_of(history, line)
        if not ours or ours & {_asked(one) for one in series}:
            found.append(series)
        if len(found) == MISSED_RUNS:
            break
    return found


def _series_of(history: History, line: Line) -> tuple[Identity, ...]:
    return tuple(history.series(history.points_of_run(line.number)).values())


def _sure(candidates: Sequence[_Candidate]) -> set[str]:
    """Return the fingerprints of the series whose steps stand among all that was looked at."""
    families: dict[object, list[_Candidate]] = {}
    for one in candidates:
        families.setdefault(one.identity.family, []).append(one)
    p_values = [[one.shift.p_value if one.shift else 1.0 for one in family] for family in families.values()]
    fallen = discoveries_in_families(p_values, FALSE_DISCOVERY_RATE)
    return {
        one.identity.fingerprint
        for family, fell in zip(families.values(), fallen, strict=True)
        for one, found in zip(family, fell, strict=True)
        if found
    }


def _finding(history: History, one: _Candidate, sure: bool, old: Sequence[Identity], rule: StepRule) -> Finding:
    times = tuple(seconds for _, seconds in one.times)
    word, reason = _verdict(one, sure, old, rule)
    since = one.times[one.shift.at][0] if one.shift else None
    return Finding(
        case=one.identity.case,
        world=one.identity.world,
        word=word,
        reason=reason,
        times=times,
        shift=one.shift,
        since=since,
        differs=_differs(history, one) if one.shift else (),
        measured=one.measured,
    )


def _verdict(one: _Candidate, sure: bool, old: Sequence[Identity], rule: StepRule) -> tuple[Word, str]:
    if one.value.status in _STATUS_WORDS:
        return _STATUS_WORDS[one.value.status], one.value.reason or one.value.status
    if len(one.times) < rule.min_values:
        told = f"{len(one.times)} of the {rule.min_values} runs that are needed"
        return "INSUFFICIENT", "; ".join([told, *_why_new(one.identity, old)])
    if one.shift is None:
        return "SAME", ""
    if not sure:
        return "AMBIGUOUS", "a step that is sure alone, but not among all series"
    return ("SLOWER" if one.shift.change > 0 else "FASTER"), ""


def _why_new(identity: Identity, old: Sequence[Identity]) -> list[str]:
    """Return what differs from the same case in the run before, where it makes this another series."""
    if any(other.fingerprint == identity.fingerprint for other in old):
        return []
    same_case = [other for other in old if other.case.id == identity.case.id]
    if not same_case:
        return []
    return [f"a new series: {', '.join(_changes(same_case[0].around, identity.around)) or 'another world'}"]


def _differs(history: History, one: _Candidate) -> tuple[str, ...]:
    """Return what was beside the series after its step and not before."""
    assert one.shift is not None, "only a step has two sides"
    lines = [one.times[place][0] for place in (one.shift.at - 1, one.shift.at)]
    by_run = {value.run: value.beside for value in history.points_of_series(one.number)}
    sides = [{**history.beside(by_run[line.number]), "commit": line.commit or cells.UNKNOWN} for line in lines]
    return _changes(*sides)


def _changes(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    paths = sorted({*base, *new})
    pairs = [(path, base.get(path, cells.UNKNOWN), new.get(path, cells.UNKNOWN)) for path in paths]
    return tuple(f"{path}: {one} -> {other}" for path, one, other in pairs if one != other)


def _missing(kin: Sequence[Sequence[Identity]], ours: Set[_Asked]) -> list[Finding]:
    """Return the cases that one of the last runs of this kind had, and this one has not."""
    old = {_asked(one): one for series in reversed(kin) for one in series}
    runs = f"one of the {len(kin)} runs before" if len(kin) > 1 else "the run before"
    reason = f"{runs} that share a case with this one has it, and this one has not"
    return [
        Finding(case=one.case, world=one.world, word="MISSING", reason=reason)
        for asked, one in old.items()
        if asked not in ours
    ]


def _asked(identity: Identity) -> _Asked:
    world = identity.world
    return (identity.case.id, world.size, world.backend, world.device)
