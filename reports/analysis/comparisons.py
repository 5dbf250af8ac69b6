"""Cases of one run compared with each other: a value of a parameter with its default.

All comparisons are paired by repetition. Their significance is corrected for the number of
comparisons (false discovery rate).
"""

from dataclasses import dataclass

from parbench.bench.results.formatting import to_single_line
from parbench.reports.analysis.case_results import CaseResult, group_results
from parbench.reports.analysis.operations import GROUP_PARAMS
from parbench.reports.run_data import RunData
from parbench.reports.stats import LEVEL, Effect, estimate_paired_effect, select_discoveries

_OWN_TABLES = ("size_bytes", "dtype", "mode", "background", "source", "target", "mesh")
"""Parameters that ``compare_settings`` leaves out, because other tables compare their values."""
_IMPORT_PARAMS = ("placement", "repeat")
"""Parameters of imported cases that are no settings of a job."""
MAX_SENTENCES = 5
"""The largest number of comparisons that a report describes in sentences."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The duration of a case relative to a base case of the run that differs in one parameter."""

    param: str
    """The name of the parameter in which the two cases differ."""
    base: CaseResult
    """The case with the default value, or the first case if none has it."""
    result: CaseResult
    """The case that is compared with the base."""
    effect: Effect
    """The relative change of the duration from the base to ``result``, with its 95 % interval."""


def describe_settings(data: RunData) -> list[str]:
    """Return sentences about the largest effects of parameters on the time, at most five.

    Significant effects come first, then the others, both from the largest. A last sentence
    describes the statistics if an effect was tested. The list is empty without comparisons
    (``compare_settings``).
    """
    comparisons = compare_settings(data)
    if not comparisons:
        return []
    discoveries = select_discoveries([comparison.effect.p_value for comparison in comparisons])
    ranking = sorted(
        zip(comparisons, discoveries, strict=True),
        key=lambda pair: (not pair[1], -abs(pair[0].effect.change)),
    )
    sentences = []
    for comparison, is_significant in ranking[:MAX_SENTENCES]:
        case = comparison.result.case
        setting = f" {comparison.param}={case.params.get(comparison.param)}"
        name = data.labels[case.id].replace(setting, "")
        sentences.append(f"{name}: {_describe_change(comparison, is_significant=is_significant)}")
    if any(comparison.effect.p_value is not None for comparison in comparisons):
        text = "Times are paired by repetition. Brackets are 95 % CIs."
        if len(ranking) > 1:
            text += f" The false discovery rate over all {len(ranking)} comparisons is at most "
            text += f"{100 * LEVEL:.0f} %."
        sentences.append(text)
    return sentences


def compare_settings(data: RunData) -> list[Comparison]:
    """Compare each case with the case that differs only by the default value of one parameter.

    If no measured case has the default value, the first case takes its place as the base. Sizes,
    types, modes, background loads, groups, pairs of ranks and meshes are not compared. Cases that
    share no repetition with their base are left out. So are, in imported runs, the placement, repeated
    cases, and effects without a p-value. The result is in the order of parameters.
    """
    is_imported = data.plan.is_imported
    excluded = _OWN_TABLES + GROUP_PARAMS + (_IMPORT_PARAMS if is_imported else ())
    params = dict.fromkeys(param for result in data.measured for param in result.case.params)
    comparisons = []
    for param in params:
        if param in excluded:
            continue
        for results in group_results(data.measured, param):
            with_default = [result for result in results if param not in result.case.params]
            base = (with_default or results)[0]
            for result in results:
                effect = estimate_paired_effect(
                    base.by_repetition(base.headline), result.by_repetition(base.headline)
                )
                if effect is None or (is_imported and effect.p_value is None):
                    continue
                if result is not base:
                    comparison = Comparison(param=param, base=base, result=result, effect=effect)
                    comparisons.append(comparison)
    return comparisons


def _describe_change(comparison: Comparison, *, is_significant: bool) -> str:
    """Return a clause on a comparison: ``method=ulysses is 10 % faster than ring [-12 %, -8 %]``.

    The brackets are the 95 % interval of the change. A change that is not significant is followed
    by its number of repetitions.
    """
    effect = comparison.effect
    direction = "slower" if effect.change > 0 else "faster"
    value, base = (
        to_single_line(str(result.case.all_params.get(comparison.param)))
        for result in (comparison.result, comparison.base)
    )
    text = f"{comparison.param}={value} is {100 * abs(effect.change):.0f} % {direction} than {base}"
    if effect.low is not None and effect.high is not None:
        text += f" [{100 * effect.low:+.0f} %, {100 * effect.high:+.0f} %]"
    return text if is_significant else f"{text}, not significant (n={effect.num_repetitions})"
