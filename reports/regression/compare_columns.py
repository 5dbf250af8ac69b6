"""The columns and sentences of a comparison, as data: every format shows the same ones."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from bench.results.runs import Run
from bench.text import format_duration
from reports import cells
from reports.analysis.labels import operation, short_labels
from reports.analysis.problems import emulations
from reports.regression.compare import WORST_FIRST, Comparison, Family, Series, Word, world_words
from reports.regression.environment import Change
from reports.regression.noise_floor import told
from reports.regression.rule import Effect, Rule
from reports.report import Column, number, words
from reports.sections.row_columns import case_columns

MEANINGS: Mapping[Word, str] = {
    "WRONG": "a result differs from the reference, so it has no time",
    "SLOWER": "the interval clears the floor, also among all that is compared",
    "FAILED": "it failed or hung in NEW",
    "MISSING": "BASE has it and NEW does not",
    "ENV-CHANGED": "the surroundings differ, so a change of the time says nothing of the code",
    "INSUFFICIENT": "too few launches to decide",
    "AMBIGUOUS": "neither a change nor its absence is sure",
    "NEW": "NEW has it and BASE does not",
    "FASTER": "as SLOWER, the other way",
    "SAME": "the interval lies within the floor, without what drift adds to it",
}


def series_columns(series: Sequence[Series]) -> tuple[Column[Series], ...]:
    """Return the columns of single series; what tells them apart is never dropped."""
    return (
        *_identity(series),
        case_columns()[2].of(lambda one: one.row),
        verdict_column(),
        _effect(),
        *_limits(),
        *_evidence(),
        words("why", lambda one: one.reason or cells.UNKNOWN, "why nothing can be said, or what went wrong", drop=2),
    )


def family_columns(families: Sequence[Family]) -> tuple[Column[Family], ...]:
    """Return the columns of families: each one operation over its sizes."""
    first = [family.series[0] for family in families]
    moved_help = "the sizes at which the family moved"
    return (
        *(_of_first(column) for column in _identity(first)),
        words("sizes", sizes_words, "the family's sizes"),
        words("verdict", lambda family: family.word, "the worst of its members'"),
        words("slower at", lambda family: _moved(family, "SLOWER"), moved_help),
        words("faster at", lambda family: _moved(family, "FASTER"), moved_help),
        number("p", lambda one: one.p_value, probability, "of no member having moved beyond its floor (Simes)", 1),
    )


def change_columns() -> tuple[Column[Change], ...]:
    """Return the columns of what differs around the runs."""
    return (
        words("what", lambda one: one.path, "the value's path in the run's environment"),
        words("BASE", lambda one: one.base, "its value in BASE"),
        words("NEW", lambda one: one.new, "its value in NEW"),
        words("forbids a comparison", _forbids, "whether times may still be compared"),
    )


def heading(comparison: Comparison) -> tuple[str, ...]:
    """Return which runs were compared, the verdict with its counts, and what of them is emulated."""
    return (
        _run_words("BASE", comparison.base),
        _run_words("NEW", comparison.new),
        f"Verdict: {verdict_words(comparison)}",
        *(f"BASE is {note}" for note in emulations(comparison.base)),
        *(f"NEW is {note}" for note in emulations(comparison.new)),
    )


def verdict_words(comparison: Comparison) -> str:
    """Return how many series have each verdict, the worst first."""
    return ", ".join(f"{count} {word}" for word, count in comparison.counts.items())


def sentences(comparison: Comparison) -> tuple[str, ...]:
    """Return what a reader must know of the verdicts that occur, each a sentence."""
    rule = comparison.rule
    meanings = [f"{word}: {MEANINGS[word]}." for word in WORST_FIRST if word in comparison.counts]
    return (
        *meanings,
        f"Effect: the ratio of the launches' geometric means with its 95 % interval (Welch's t on log medians); "
        f"+ is slower; floor: {cells.percent(rule.floor)}, or what the runs' own drift may make of no change.",
        *told([one.measured for one in comparison.series if one.measured]),
        f"False discoveries are held to {cells.percent(rule.false_discovery_rate)} over "
        f"{len(comparison.families)} famil{'y' if len(comparison.families) == 1 else 'ies'} and within each; "
        f"a rank test has to agree at {cells.percent(rule.rank_level)}.",
        *comparison.notes,
        *_apart(comparison),
        *_advice(comparison, rule),
    )


def effect_words(found: Effect | None) -> str:
    """Return a change with its interval: ``+5.1 % [+3.9, +6.3]``."""
    if found is None:
        return cells.UNKNOWN
    text = f"{_signed(found.change)} %"
    return text if found.low is None or found.high is None else f"{text} [{_signed(found.low)}, {_signed(found.high)}]"


def sizes_words(family: Family) -> str:
    """Return a family's sizes: ``1K to 16M (8)``, or ``-`` where it has none."""
    sizes = [cells.size(one.case.params.get("size_bytes")) for one in family.series]
    return sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} ({len(sizes)})"


def probability(value: float | None) -> str:
    """Return a probability, a very small one as a bound."""
    if value is None:
        return cells.UNKNOWN
    return "<0.0001" if value < 1e-4 else f"{value:.4f}"


def worst_first(series: Sequence[Series]) -> list[Series]:
    """Return series by verdict, the worst first, and by the size of their change."""
    return sorted(series, key=lambda one: (WORST_FIRST.index(one.word), -abs(one.effect.change) if one.effect else 0.0))


def verdict_column() -> Column[Series]:
    """Return the column of verdicts, sorted from the worst."""
    return Column(
        title="verdict",
        text=lambda one: one.word,
        sort=lambda one: WORST_FIRST.index(one.word),
        help="what can be said",
        number=False,
    )


def _identity(series: Sequence[Series]) -> tuple[Column[Series], ...]:
    """Return the columns that name a series without its size; the world only where there are several."""
    names = short_labels([one.row for one in series if not one.row.is_communication])
    worlds = len({one.world for one in series}) > 1
    return (
        words("operation", lambda one: names.get(one.case.id) or operation(one.case), "what is done"),
        *(column.of(lambda one: one.row) for column in case_columns(0, 5)[:2]),
        *((words("ranks", lambda one: world_words(one.world), "where it runs"),) if worlds else ()),
    )


def _of_first(column: Column[Series]) -> Column[Family]:
    return words(column.title, lambda family: column.text(family.series[0]), column.help, column.drop)


def _effect() -> Column[Series]:
    return Column(
        title="effect",
        text=lambda one: effect_words(one.effect),
        sort=lambda one: one.effect.change if one.effect else None,
        help="how much longer it takes, with the 95 % interval",
    )


def _limits() -> tuple[Column[Series], ...]:
    def floor(one: Series) -> float | None:
        return one.effect.floor if one.effect else None

    def detectable(one: Series) -> float | None:
        return one.effect.detectable if one.effect else None

    return (
        number("floor", floor, cells.percent, "what the interval has to clear", 3),
        number("detectable", detectable, cells.percent, "what is called in four of five such comparisons", 1),
    )


def _evidence() -> tuple[Column[Series], ...]:
    def side(name: str, new: bool) -> Column[Series]:
        def value(one: Series) -> float | None:
            row = one.new if new else one.base
            return row.value(row.headline) if row else None

        return number(name, value, cells.duration, f"the time in {name}, over its launches", 4)

    return (
        side("BASE", new=False),
        side("NEW", new=True),
        number(
            "rank p",
            lambda one: one.effect.rank_p_value if one.effect else None,
            probability,
            "of no change, by the ranks of the launches alone (Mann-Whitney)",
            6,
        ),
        words(
            "launches",
            lambda one: f"{len(one.base_seconds)} v {len(one.new_seconds)}",
            "launches that measured it in BASE and in NEW",
            drop=7,
        ),
    )


def _moved(family: Family, word: Word) -> str:
    moved = [one for one in family.series if one.word == word]
    told = [f"{cells.size(one.case.params.get('size_bytes'))} {effect_words(one.effect)}" for one in moved]
    return ", ".join(text.removeprefix(f"{cells.UNKNOWN} ") for text in told) or cells.UNKNOWN


def _signed(fraction: float) -> str:
    text = cells.significant(100 * fraction)
    return text if text.startswith("-") or text == "0" else f"+{text}"


def _forbids(one: Change) -> str:
    within = f" ({one.within} changed within itself)" if one.within else ""
    if one.decisive:
        return f"yes{within}"
    return f"no: meant{within}" if one.meant else f"no{within}"


def _run_words(name: str, run: Run) -> str:
    plan = run.info.plan
    launches = f"{plan.launches} launch{'es' * (plan.launches != 1)}"
    return f"{name}: {run.path}, host {run.info.host}, started {run.info.started}, {launches}"


def _apart(comparison: Comparison) -> list[str]:
    """Say how long after the one run the other was measured: what drifted in between looks like an effect."""
    times = [datetime.fromisoformat(run.info.started) for run in (comparison.base, comparison.new)]
    seconds = (times[1] - times[0]).total_seconds()
    if seconds == 0:
        return []
    order = "after" if seconds > 0 else "before"
    return [f"NEW began {format_duration(abs(seconds))} {order} BASE: what drifted in between is part of the effect."]


def _advice(comparison: Comparison, rule: Rule) -> list[str]:
    found = []
    if "INSUFFICIENT" in comparison.counts:
        found.append(f"Measure with parbench run --launches {rule.min_launches} or more, and the budget for them.")
    if "AMBIGUOUS" in comparison.counts:
        found.append("More launches, or a quieter machine (see parbench doctor), make what is AMBIGUOUS plain.")
    paths = [one.path for one in comparison.changes if one.decisive]
    if "ENV-CHANGED" in comparison.counts and paths:
        found.append(f"If a difference is what you test, say so: --across {paths[0]}.")
    return found
