"""Cases of a run compared with each other: parameters with their defaults, loads with none.

All comparisons are paired by repetition, and corrected for their number (false discovery rate).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parbench.bench.results.formatting import to_single_line
from parbench.bench.text import pluralize
from parbench.reports.analysis.case_results import CaseResult, group_results
from parbench.reports.analysis.labels import label_differences
from parbench.reports.analysis.operations import GROUP_PARAMS
from parbench.reports.run_data import RunData
from parbench.reports.stats import (
    LEVEL,
    Effect,
    compute_required_repetitions,
    estimate_paired_effect,
    select_discoveries,
)

_OWN_TABLES = ("size_bytes", "dtype", "mode", "background", "source", "target", "mesh")
"""Parameters that other tables and figures compare."""
MAX_SENTENCES = 5
MAX_SUGGESTED_REPETITIONS = 50


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The time of a case relative to a base case that differs only in one parameter."""

    param: str
    base: CaseResult
    result: CaseResult
    effect: Effect
    is_significant: bool
    """True if the effect is a discovery among all comparisons of its kind."""

    def get_value(self, result: CaseResult) -> str:
        """Return the value of the parameter in a case as text."""
        return to_single_line(str(result.case.all_params.get(self.param)))


def compare_with_loads(data: RunData, param: str) -> list[Comparison]:
    """Compare cases under a load with the same cases without it.

    ``param`` is ``background`` for a load on every rank, or ``concurrent`` for groups that run at
    the same time.
    """
    comparisons = _compare(data, [param])
    return [comparison for comparison in comparisons if param not in comparison.base.case.params]


def compare_settings(data: RunData) -> list[Comparison]:
    """Compare cases that differ in one parameter with the one that has its default value.

    Without the default value, the base is the first case. Significant and large effects come first.
    """
    params = dict.fromkeys(param for result in data.measured for param in result.case.params)
    others = {*_OWN_TABLES, *GROUP_PARAMS}
    comparisons = _compare(data, [param for param in params if param not in others])
    return sorted(
        comparisons,
        key=lambda comparison: (not comparison.is_significant, -abs(comparison.effect.change)),
    )


def _compare(data: RunData, params: Sequence[str]) -> list[Comparison]:
    """Compare cases that differ in one parameter only with their base.

    The base has the default value, which a case does not list. Otherwise it is the first case.
    """
    effects = []
    for param in params:
        for results in group_results(data.measured, param):
            with_default = [result for result in results if param not in result.case.params]
            base = (with_default or results)[0]
            for result in results:
                effect = estimate_paired_effect(
                    base.by_repetition(base.headline), result.by_repetition(base.headline)
                )
                if effect is not None and result is not base:
                    effects.append((param, base, result, effect))
    discoveries = select_discoveries([effect.p_value for *_, effect in effects])
    return [
        Comparison(
            param=param, base=base, result=result, effect=effect, is_significant=is_significant
        )
        for (param, base, result, effect), is_significant in zip(effects, discoveries, strict=True)
    ]


def describe_settings(data: RunData) -> list[str]:
    """Return a sentence for each of the largest effects of parameters, and one on the method."""
    comparisons = compare_settings(data)
    if not comparisons:
        return []
    count = len(comparisons)
    sentences = []
    for comparison in comparisons[:MAX_SENTENCES]:
        case = comparison.result.case
        labels = label_differences(data.measured, [comparison.param, *_OWN_TABLES])
        name = f"{case.short_name} {labels[case.id]}".strip()
        sentences.append(f"{name}: {describe_comparison(comparison, count)}")
    if count > MAX_SENTENCES:
        sentences.append(f"{count - MAX_SENTENCES} more comparisons have smaller effects.")
    if any(comparison.effect.p_value is not None for comparison in comparisons):
        sentences.append(
            f"Times are paired by repetition. Brackets are 95 % CIs. Significance holds for all "
            f"{pluralize(count, 'comparison')} (false discovery rate {100 * LEVEL:.0f} %)."
        )
    return sentences


def describe_comparison(comparison: Comparison, num_comparisons: int) -> str:
    """Return a clause such as ``method=ulysses is 10 % faster than ring [-12 %, -8 %]``."""
    effect = comparison.effect
    direction = "slower" if effect.change > 0 else "faster"
    value = comparison.get_value(comparison.result)
    base = comparison.get_value(comparison.base)
    text = f"{comparison.param}={value} is {100 * abs(effect.change):.0f} % {direction} than {base}"
    if effect.low is not None and effect.high is not None:
        text += f" [{100 * effect.low:+.0f} %, {100 * effect.high:+.0f} %]"
    if comparison.is_significant:
        return text
    correction = ""
    if effect.p_value is not None and effect.p_value <= LEVEL:
        correction = f" after correction for {num_comparisons} comparisons"
    text += f", not significant{correction} (n={effect.num_repetitions})"
    if effect.noise is None:
        return text
    required = compute_required_repetitions(
        effect.noise, abs(effect.change), level=LEVEL / num_comparisons
    )
    if required is not None and effect.num_repetitions < required <= MAX_SUGGESTED_REPETITIONS:
        text += f". Try: --repetitions {required}"
    return text
