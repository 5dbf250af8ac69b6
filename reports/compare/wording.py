"""What a comparison says in words: of its counts, of the whole run, of an effect."""

from parbench.bench.results.formatting import UNKNOWN, format_number, format_percent, make_formatter
from parbench.reports.analysis.labels import operation
from parbench.reports.compare.compare import (
    VERDICTS,
    WORST_FIRST,
    Comparison,
    Series,
    count_verdicts,
)
from parbench.reports.compare.counts import CountChange
from parbench.reports.compare.rule import Effect
from parbench.reports.limits import sentences as budget_words

CANNOT_TELL = "cannot tell"
Counted = tuple[Series, CountChange]


def changed_counts(comparison: Comparison) -> list[Counted]:
    """Return every count that changed, with its series: the worst first, those that are meant last."""
    found = [(one, change) for one, held in comparison.counted for change in held.changes]
    return sorted(found, key=lambda pair: (pair[1].meant, WORST_FIRST.index(pair[1].word)))


def verdicts(comparison: Comparison) -> tuple[str, ...]:
    told = (*budget_words(comparison.budgets), count_words(comparison), whole_words(comparison))
    return tuple(filter(None, told))


def count_words(comparison: Comparison) -> str:
    """Return in a sentence what of the counts changed, nothing where none is held."""
    if not comparison.counted:
        return ""
    every = (
        f"{sum(found.count for _, found in comparison.counted)} in {len(comparison.counted)} series"
    )
    changed = [
        (one, change) for one, change in changed_counts(comparison) if change.word == "CHANGED"
    ]
    if not changed:
        return f"Counts: none of {every} changed."
    meant = sum(change.meant for _, change in changed)
    (one, first), others = changed[0], f"; and {len(changed) - 1} more" if changed[1:] else ""
    told = f"{len(changed)} of {every} changed{f', {meant} of them meant' if meant else ''}"
    return f"Counts: {told}: {operation(one.case)}: {first.told}{others}."


def whole_words(comparison: Comparison) -> str:
    """Return the verdict on the whole run in a sentence, nothing where one series is all that is judged."""
    if not comparison.is_timed:
        counts, what = (
            count_verdicts(one.word for one in comparison.series),
            "no time" if comparison.counted else "nothing",
        )
        why = ", ".join(
            f"{count} {word} ({VERDICTS[word].meaning})" for word, count in counts.items()
        )
        return f"The whole run: {what} could be compared: {why}."
    if (whole := comparison.whole) is None:
        return ""
    told = f"{whole.word}, {effect_words(whole.effect)}, over {whole.series} series"
    alone = whole.word in comparison.counts or whole.word not in ("SLOWER", "FASTER")
    return f"The whole run: {told}{'' if alone else ', where no single one can be called'}."


def effect_words(found: Effect | None) -> str:
    """Return a change with its interval, ``+5.1 % [+3.9, +6.3]``, and no numbers where that spans a factor of ten."""
    if found is None:
        return UNKNOWN
    known = [100 * value for value in (found.change, found.low, found.high) if value is not None]
    change, *interval = (f"{'+' * (value > 0)}{format_number(value)}" for value in known)
    if found.low is not None and found.high is not None and 1 + found.high > 10 * (1 + found.low):
        return CANNOT_TELL
    return f"{change} % [{', '.join(interval)}]" if interval else f"{change} %"


def reach(value: float | None) -> str:
    return format_percent(value) if value is None or value < 9 else CANNOT_TELL


def probability(value: float | None) -> str:
    return make_formatter("{:.4f}")(value) if value is None or value >= 1e-4 else "<0.0001"
