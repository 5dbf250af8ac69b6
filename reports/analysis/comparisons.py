"""Cases of one run compared with each other: a parameter with its default, a load with no load.

All comparisons are paired by repetition. Their significance is corrected for the number of
comparisons (false discovery rate).
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
"""The largest number of comparisons that a report describes in sentences."""
MAX_SUGGESTED_REPETITIONS = 50
"""A sentence suggests more repetitions only up to this number."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The duration of a case relative to a base case that differs in one parameter.

    Both are cases of the same run.
    """

    param: str
    """The name of the parameter in which the two cases differ."""
    base: CaseResult
    """The case with the default value, or the first case if none has it."""
    result: CaseResult
    """The case that is compared with the base."""
    effect: Effect
    """The relative change of the duration from the base to ``result``, with its 95 % interval."""
    is_significant: bool
    """True if the change is significant at a 5 % false discovery rate over all comparisons made."""

    def get_value(self, result: CaseResult) -> str:
        """Return the value of the differing parameter in a case as text."""
        return to_single_line(str(result.case.all_params.get(self.param)))


def compare_with_loads(data: RunData, param: str) -> list[Comparison]:
    """Compare each case under a load with the same case without that load.

    ``param`` is the parameter that adds the load: ``background`` for a load on every rank, or
    ``concurrent`` for groups of ranks that communicate at the same time.
    """
    comparisons = _compare(data, [param])
    return [comparison for comparison in comparisons if param not in comparison.base.case.params]


def compare_settings(data: RunData) -> list[Comparison]:
    """Compare cases that differ in one parameter with the case that has its default value.

    If no case has the default value, the first case of the plan takes its place. Significant
    comparisons come first, then the others, both from the largest absolute change. Sizes, types,
    modes, loads and groups are not compared.
    """
    params = dict.fromkeys(param for result in data.measured for param in result.case.params)
    others = {*_OWN_TABLES, *GROUP_PARAMS}
    comparisons = _compare(data, [param for param in params if param not in others])
    return sorted(
        comparisons,
        key=lambda comparison: (not comparison.is_significant, -abs(comparison.effect.change)),
    )


def _compare(data: RunData, params: Sequence[str]) -> list[Comparison]:
    """Compare measured cases that differ only in one of ``params`` with their base case.

    The base case has the default value of the parameter. If no case has it, the first case is the
    base. Cases that share no repetition with their base are left out.
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
    """Return sentences about the largest effects of parameters, then one on the statistics.

    Significant effects come first. At most five are described. The list is empty if no two cases
    differ in one parameter only.
    """
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
    """Return a clause on a comparison: ``method=ulysses is 10 % faster than ring [-12 %, -8 %]``.

    The brackets are the 95 % interval of the change. ``num_comparisons`` is the number of
    comparisons in the report, for which significance is corrected. A change that is not significant
    is followed by its number of repetitions, and by the ``--repetitions`` that may suffice.
    """
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
