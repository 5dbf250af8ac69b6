"""A comparison, shown: its columns and sentences, and the four forms of them: table, Markdown, JSON and JUnit XML."""

import math
import shlex
import sys
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

from parbench.bench.results.formatting import (
    UNKNOWN,
    format_case_size,
    format_percent,
    format_seconds,
)
from parbench.bench.results.limits import read_limits
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import UserError, format_duration, pluralize
from parbench.reports.analysis.labels import operation, row_label, short_labels
from parbench.reports.analysis.summary import Row
from parbench.reports.analysis.verdicts import emulations
from parbench.reports.compare.ab import LOOKS, SHORTEST_SECONDS
from parbench.reports.compare.compare import (
    VERDICTS,
    WORST_FIRST,
    Comparison,
    Family,
    Series,
    Word,
    compare,
    describe_world,
    encode_report,
    notes_of_pools,
)
from parbench.reports.compare.counts import CountChange
from parbench.reports.compare.environment import Change
from parbench.reports.compare.junit import as_junit
from parbench.reports.compare.rule import Rule, floor_to_decide, repetitions_to_decide
from parbench.reports.compare.thresholds import find_thresholds, told
from parbench.reports.compare.wording import (
    Counted,
    changed_counts,
    effect_words,
    probability,
    reach,
    verdicts,
)
from parbench.reports.figures.primitives import IntervalRow
from parbench.reports.history.runs import find_run
from parbench.reports.limits import judge
from parbench.reports.render.markdown import escaped, markdown_table
from parbench.reports.render.terminal import Sheet, width_of, write_table
from parbench.reports.report import Column, T, number, words
from parbench.reports.sections.row_columns import case_columns

MARKDOWN_BYTES = (
    1_000_000  # a GitHub step summary holds 1024 KiB; the rest is left to what else a job says
)


def compare_runs(
    base: str,
    new: str,
    *,
    floor: str | None = None,
    across: Sequence[str] = (),
    form: str = "table",
    fail_on_unknown: bool = False,
    history: Path | None = None,
    budgets: Path | None = None,
    figure: Path | None = None,
) -> tuple[str, int]:
    """Return a comparison as text, and the exit code; words, ``floor`` and ``history`` as the command takes them.

    The effects are also drawn to a file if there is one.
    """
    newer = find_run(new, history)
    older = find_run(base, history, without=newer.info.id)
    if older.path.resolve() == newer.path.resolve():
        raise UserError(f"BASE and NEW are the same run, {older.path}: name two runs")
    least, floors = find_thresholds(floor)
    comparison = compare(older, newer, Rule(floor=least), across, floors)
    asked = (
        ()
        if budgets is None
        else read_limits(budgets, newer.info.plan.cases, newer.info.plan.skipped)
    )
    comparison = replace(
        comparison, notes=notes_of_pools((older, newer)), budgets=judge(newer, asked)
    )
    comparison = advised(comparison)
    code = comparison.code(fail_on_unknown=fail_on_unknown)
    if figure is not None:
        draw_effects(comparison, figure)
    if form == "table":
        return as_table(comparison, width=width_of(sys.stdout)), code
    if form == "json":
        return as_json(comparison, code=code), code
    return (as_junit if form == "junit" else as_markdown)(comparison), code


_HUES: dict[Word, str] = {"SLOWER": "red", "FASTER": "green", "SAME": "grey"}


def draw_effects(comparison: Comparison, file: Path) -> None:
    """Draw the effect of each series with its interval; ``UserError`` if no effect is known."""
    from parbench.reports.figures.changes import chart_effects
    from parbench.reports.figures.svg import save_chart

    labels = short_labels([one.row for one in comparison.series])
    rows = []
    for one in comparison.series:
        effect = one.effect
        if effect is not None:
            low = effect.change if effect.low is None else effect.low
            high = effect.change if effect.high is None else effect.high
            name = row_label(one.row) if one.row.is_communication else labels[one.case.id]
            label = f"{name}: {one.word}"
            interval = (effect.change, low, high)
            rows.append(
                IntervalRow(label=label, interval=interval, hue=_HUES.get(one.word, "blue"))
            )
    chart = chart_effects(rows, comparison.rule.floor)
    if chart is None:
        raise UserError("no figure: no series was measured in both runs")
    save_chart(chart, file)


def advised(
    comparison: Comparison, command: Sequence[str] = (), words: Sequence[str] = ()
) -> Comparison:
    """Return the comparison with a note on how many repetitions would decide what is AMBIGUOUS.

    ``command`` is the ``parbench ab`` that measured it and ``words`` are the options of ``run`` after it. The note
    repeats them with more repetitions; without them it names ``parbench ab`` alone.
    """
    doubtful = [one.effect for one in comparison.series if one.word == "AMBIGUOUS" and one.effect]
    noises = [effect.noise for effect in doubtful if effect.noise is not None]
    if (
        not noises or not comparison.rule.floor
    ):  # within no floor at all no number of repetitions shows anything
        return comparison
    floor = comparison.rule.floor
    needed = max(LOOKS[0], repetitions_to_decide(median(noises), floor))
    note = f"{needed} repetitions a side, interleaved by parbench ab, decide about half of what is AMBIGUOUS"
    if needed > LOOKS[-1]:
        floor = floor_to_decide(median(noises), LOOKS[-1])
        note += f"; it makes at most {LOOKS[-1]}, which decide as much at a floor of {100 * floor:.0f} %"
        command = [*command, "--floor", f"{100 * floor:.0f}%"] if command else ()
    if command:
        plan, count = comparison.new.info.plan, min(needed, LOOKS[-1])
        minutes = math.ceil(
            2 * count * max(SHORTEST_SECONDS, plan.budget_seconds / plan.repetitions) / 60
        )
        note += f": {shlex.join([*command, '--repetitions', str(count), '--budget', f'{minutes}m', *words])}"
    return replace(comparison, notes=(*comparison.notes, note))


def as_table(comparison: Comparison, *, width: int | None = None) -> str:
    """Return tables for a terminal of so many columns; for None, a pipe's, nothing is wrapped."""
    sheet, changed = Sheet(width, color=False), changed_counts(comparison)
    sheet.tell(*verdicts(comparison), *heading(comparison))
    write_table(sheet, "Counts", count_columns(changed), changed)
    write_table(sheet, "Families", family_columns(comparison.families), comparison.families)
    write_table(sheet, "Series", series_columns(comparison.series), comparison.series)
    write_table(sheet, "What differs around them", change_columns(), comparison.changes)
    sheet.write("")
    sheet.tell(*sentences(comparison))
    return sheet.text()


def as_markdown(comparison: Comparison, *, limit_bytes: int = MARKDOWN_BYTES) -> str:
    """Return GitHub's Markdown: the worst first, so that what goes beyond ``limit_bytes`` is cut, and counted."""
    families = sorted(comparison.families, key=lambda family: WORST_FIRST.index(family.word))
    by_change = sorted(
        comparison.series, key=lambda one: -abs(one.effect.change) if one.effect else 0.0
    )
    series = sorted(by_change, key=lambda one: WORST_FIRST.index(one.word))
    runs, verdict, emulated = (head := heading(comparison))[:2], head[2], head[3:]
    changed = changed_counts(comparison)
    lines = [
        f"## parbench compare: {escaped(verdict.removeprefix('Verdict: '))}",
        "",
        *(f"{escaped(line)}  " for line in (*verdicts(comparison), *runs, *emulated)),
        *_cut("Counts", count_columns(changed), changed, limit_bytes // 5),
        *_cut("Families", family_columns(families), families, limit_bytes // 5),
        *_cut("What differs around them", change_columns(), comparison.changes, limit_bytes // 5),
        *_cut("Series", series_columns(series), series, limit_bytes // 3),
        "",
        *(f"- {escaped(sentence)}" for sentence in sentences(comparison)),
        "",
    ]
    return "\n".join(lines)


def _cut(
    title: str, columns: Sequence[Column[T]], rows: Sequence[T], limit_bytes: int
) -> list[str]:
    if not rows:
        return []
    lines = ["", f"### {title}", "", *markdown_table(columns, rows).splitlines()]
    fit = max(5, bisect([*accumulate(len(line.encode()) + 1 for line in lines)], limit_bytes))
    left = f"{len(lines) - fit} more rows have no room here; `--format json` has all."
    return [*lines[:fit], *(["", left] if fit < len(lines) else [])]


def as_json(comparison: Comparison, *, code: int) -> str:
    """Return everything as JSON, with the exit code; times in seconds, changes as fractions, unknown is null."""

    def about(run: Run) -> dict[str, Any]:
        named = {name: getattr(run.info, name) for name in ("host", "started", "parbench")}
        return {"id": run.info.id, "path": str(run.path), **named}

    def series(one: Series) -> dict[str, Any]:
        named = {"case": one.case, "world": one.world, "verdict": one.word, "reason": one.reason}
        seconds = {
            "base_seconds": [*one.base_times.values()],
            "new_seconds": [*one.new_times.values()],
        }
        around = {
            "environment": [change.path for change in one.changes],
            "measured_floor": one.measured,
        }
        return {**named, "metric": one.row.headline, "effect": one.effect, **seconds, **around}

    def change(one: Series, found: CountChange) -> dict[str, Any]:
        sides = {"base": found.base, "new": found.new, "told": found.told, "path": found.path}
        return {
            "case": one.case,
            "world": one.world,
            "verdict": found.word,
            "meant": found.meant,
            **sides,
        }

    def family(found: Family) -> dict[str, Any]:
        at = {
            word: [one.size for one in found.series if one.word == word]
            for word in ("SLOWER", "FASTER")
        }
        named = {"name": found.name, "verdict": found.word, "p_value": found.p_value}
        moved = {"slower_size_bytes": at["SLOWER"], "faster_size_bytes": at["FASTER"]}
        return {**named, **moved, "series": [*map(series, found.series)]}

    told_of = {"exit_code": code, "verdicts": comparison.counts, "environment": comparison.changes}
    whole = {
        "base": about(comparison.base),
        "new": about(comparison.new),
        "rule": comparison.rule,
        **told_of,
    }
    counts = {
        "held": sum(found.count for _, found in comparison.counted),
        "series": len(comparison.counted),
    }
    whole["budgets"] = comparison.budgets
    whole["counts"] = {**counts, "changes": [change(*one) for one in changed_counts(comparison)]}
    found = {"whole_run": comparison.whole, "families": [*map(family, comparison.families)]}
    return encode_report({**whole, "notes": comparison.notes, **found})


def heading(comparison: Comparison) -> tuple[str, ...]:
    lines, emulated = [], []
    for name, run in (("BASE", comparison.base), ("NEW", comparison.new)):
        planned, measured = (
            run.info.plan.repetitions,
            len({one.repetition for one in run.records if one.status == "ok"}),
        )
        repetitions = (
            f"{measured} of {pluralize(planned, 'repetition')}"
            if measured < planned
            else pluralize(planned, "repetition")
        )
        lines.append(
            f"{name}: {run.path}, host {run.info.host}, started {run.info.started}, {repetitions}"
        )
        emulated += [f"{name} is {note}" for note in emulations(run)]
    verdict = (
        f"Verdict: {', '.join(f'{count} {word}' for word, count in comparison.counts.items())}"
    )
    return (*lines, verdict, *emulated)


def sentences(comparison: Comparison) -> tuple[str, ...]:
    """Return what a reader must know of the verdicts that occur, each a sentence."""
    rule, counts, families = comparison.rule, comparison.counts, len(comparison.families)
    whole = comparison.whole
    correlated = (
        f", a repetition taken to correlate with the next by {whole.autocorrelation:.2f}"
        if whole
        else ""
    )
    began = [datetime.fromisoformat(run.info.started) for run in (comparison.base, comparison.new)]
    apart = (began[1] - began[0]).total_seconds()
    after = f"{format_duration(abs(apart))} {'after' if apart > 0 else 'before'}"
    decisive = [one.path for one in comparison.changes if one.decisive]
    advice = (
        [f"NEW began {after} BASE: what drifted in between is part of the effect."] if apart else []
    )
    if "INSUFFICIENT" in counts:
        advice.append(
            f"Measure with parbench run --repetitions {rule.min_repetitions} or more, and the budget for them."
        )
    if changed := [found.path for _, found in changed_counts(comparison) if found.fails]:
        how = f"--across {changed[0]}, or --across 'counts.*' for all; or let NEW be the next BASE"
        advice.append(f"Counts have no floor. If a change is meant, say so: {how}.")
    if loose := dict.fromkeys(name for _, held in comparison.counted for name in held.loose):
        advice.append(f"Not held, as repetitions of BASE do not agree on it: {', '.join(loose)}.")
    if "ENV-CHANGED" in counts and decisive:
        advice.append(f"If a difference is what you test, say so: --across {decisive[0]}.")
    return (
        *(f"{word}: {VERDICTS[word].meaning}." for word in WORST_FIRST if word in counts),
        f"Effect: the ratio of the repetitions' geometric means with its 95 % interval (Student's t on log medians, "
        f"their variances drawn together over all series{correlated}); + is slower; floor: "
        f"{format_percent(rule.floor)}, "
        "or what parbench aa measured.",
        *told([one.measured for one in comparison.series if one.measured]),
        f"False discoveries are held to {format_percent(rule.false_discovery_rate)} over {families} "
        f"famil{'y' if families == 1 else 'ies'} and within each; "
        f"a rank test has to agree at {format_percent(rule.rank_level)}. The whole run is judged at "
        f"{format_percent(rule.level)}.",
        *comparison.notes,
        *advice,
    )


def series_columns(series: Sequence[Series]) -> tuple[Column[Series], ...]:
    def time(row: Row | None) -> float | None:
        return row.value(row.headline) if row else None

    def of_effect(name: str) -> Any:
        return lambda one: getattr(one.effect, name, None)

    counts = "repetitions that measured it in BASE and in NEW"
    called = "what is called in four of five such comparisons, among all that is compared"
    by_ranks = "of no change, by the ranks of the repetitions alone (Mann-Whitney)"
    verdict: Column[Series] = Column(
        "verdict",
        attrgetter("word"),
        lambda one: WORST_FIRST.index(one.word),
        "what can be said",
        number=False,
        is_result=True,
    )
    effect = replace(
        number(
            "effect",
            of_effect("change"),
            format_percent,
            "how much longer it takes, with the 95 % interval",
        ),
        text=lambda one: effect_words(one.effect),
    )
    return (
        *_identity(series),
        verdict,
        effect,
        number("floor", of_effect("floor"), format_percent, "what the interval has to clear"),
        number("detectable", of_effect("detectable"), reach, called),
        number(
            "noise",
            of_effect("noise"),
            format_percent,
            "how far repetitions deviate from each other (1 sigma)",
        ),
        number(
            "BASE",
            lambda one: time(one.base),
            format_seconds,
            "the time in BASE, over its repetitions",
        ),
        number(
            "NEW",
            lambda one: time(one.new),
            format_seconds,
            "the time in NEW, over its repetitions",
        ),
        number("rank p", of_effect("rank_p_value"), probability, by_ranks),
        words("repetitions", lambda one: f"{len(one.base_times)} v {len(one.new_times)}", counts),
        words(
            "why",
            lambda one: one.reason or UNKNOWN,
            "why nothing can be said, or what went wrong",
        ),
    )


def count_columns(found: Sequence[Counted]) -> tuple[Column[Counted], ...]:
    *names, _ = _identity([one for one, _ in found])

    def verdict(pair: Counted) -> str:
        return f"{pair[1].word}{' (meant)' if pair[1].meant else ''}"

    return (
        *(column.of(lambda pair: pair[0]) for column in names),
        words("verdict", verdict, "whether it is a change"),
        words(
            "what changed",
            lambda pair: pair[1].told,
            "of a rank's step, as a mean over ranks; memory of the fullest",
        ),
    )


def family_columns(families: Sequence[Family]) -> tuple[Column[Family], ...]:
    def sizes(family: Family) -> str:
        found = [format_case_size(one.size) for one in family.series]
        return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]} ({len(found)})"

    moved = "the sizes at which the family moved"
    *names, _ = _identity([family.series[0] for family in families])
    return (
        *(column.of(lambda family: family.series[0]) for column in names),
        words("sizes", sizes, "the family's sizes"),
        words("verdict", lambda family: family.word, "the worst of its members'"),
        words("slower at", lambda family: _moved(family, "SLOWER"), moved),
        words("faster at", lambda family: _moved(family, "FASTER"), moved),
        number(
            "p",
            lambda one: one.p_value,
            probability,
            "of no member having moved beyond its floor (Simes)",
        ),
    )


def change_columns() -> tuple[Column[Change], ...]:
    def forbids(one: Change) -> str:
        within = f" ({one.within} changed within itself)" if one.within else ""
        return f"{'yes' if one.decisive else 'no: meant' if one.meant else 'no'}{within}"

    return (
        words("what", lambda one: one.path, "the value's path in the run's environment"),
        words("BASE", lambda one: one.base, "its value in BASE"),
        words("NEW", lambda one: one.new, "its value in NEW"),
        words("forbids a comparison", forbids, "whether times may still be compared"),
    )


def _identity(series: Sequence[Series]) -> list[Column[Series]]:
    row_of: Callable[[Series], Row] = attrgetter("row")
    names = short_labels([one.row for one in series if not one.row.is_communication])
    mode, dtype, size = (column.of(row_of) for column in case_columns())
    worlds = {one.world for one in series}
    return [
        words(
            "operation", lambda one: names.get(one.case.id) or operation(one.case), "what is done"
        ),
        mode,
        dtype,
        *(
            [words("ranks", lambda one: describe_world(one.world), "where it runs")]
            if len(worlds) > 1
            else []
        ),
        size,
    ]


def _moved(family: Family, word: Word) -> str:
    moved = [
        f"{format_case_size(one.size)} {effect_words(one.effect)}"
        for one in family.series
        if one.word == word
    ]
    return ", ".join(text.removeprefix(f"{UNKNOWN} ") for text in moved) or UNKNOWN
