"""The sentences about how a run was measured, below its tables."""

from collections import Counter

from parbench.reports.run_data import RunData

UNITS = (
    "Sizes and bus bandwidth follow nccl-tests: GB/s is 1e9 bytes per second, and 64K is 65536 "
    "bytes."
)
OVER_REPETITIONS = (
    "Times are geometric means over the medians of repetitions. [low, high] is a 95 % confidence "
    "interval by Student's t over at least three repetitions."
)
WITHIN_ONE = (
    "One repetition: times are medians of its iterations, without intervals, because the variation "
    "between repetitions is unknown."
)


def list_footnotes(data: RunData) -> tuple[str, ...]:
    """Return the sentences below a run's tables: units, methods, limits and notes of its cases.

    Notes of measured training steps are left out, because the table of steps shows them.
    """
    sentences = [UNITS] if data.communication else []
    if data.measured:
        sentences.append(OVER_REPETITIONS if data.plan.repetitions > 1 else WITHIN_ONE)
    sentences += data.plan.notes
    results = [result for result in data.results if result.is_communication or not result.metrics]
    counts = Counter(note for result in results for note in result.notes)
    sentences += [
        f"Note ({count} of {len(data.results)} cases): {note}"
        for note, count in counts.items()
        if note not in data.plan.notes
    ]
    return tuple(sentences)
