"""What the nights of all series tell together: kinds of nodes, the course that all share, how nights scatter. Pure.

A night's time of a series is its level, by the kind of node it ran on, and what all series share that night, and noise.
All are estimated over all series at once, so that a slower node, a slow night or a drift of all is no series' step.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.stats import median, t_tail
from parbench.reports.analysis.frame import group_by
from parbench.reports.history.levels import (
    Noise,
    Shift,
    StepRule,
    difference,
    newest_shift,
    rest_beside_a_step,
    segments,
    shift_of,
)
from parbench.reports.regression.statistics import discoveries_in_families

Logs = NDArray[np.float64]
MIN_SHARED = 5  # so many series have a course in common
NEIGHBOURS = 4  # nights no farther apart are compared where levels may have changed
KIND_REST = 0.15  # kinds leave no more of the squares than this; the best cut of one normal kind leaves 0.36
FOR_LINE = 8.0  # a drift is of all series rather than of one
FALSE = 0.01  # the share of false discoveries of a night's steps
SHARED_LEVEL = 0.001  # of what all series share, each night
FIRST_LEVEL = 0.01  # of any first night
ROBUST = 3 * 1.4826  # times the median of absolute rests: three deviations of a normal


@dataclass(frozen=True, kw_only=True)
class Night:
    """What tonight is against a series' nights before; ``sure`` is judged among all series.

    ``first`` is by what fraction tonight alone is above the level, where that is rare in all series' nights;
    ``moved`` says that every night since the step was on other places than those before.
    """

    shift: Shift | None = None
    sure: bool = False
    first: float | None = None
    moved: bool = False


@dataclass(frozen=True, kw_only=True)
class Nights:
    """What is found of each series, of all together (None if they are too few), and by how much places differ.

    A step's place counts a series' own nights, and all nights where it is of all together.
    """

    each: tuple[Night, ...]
    shared: Night | None
    above: Mapping[str, float]
    noise: Noise


def judge_nights(
    logs: Logs,
    places: Sequence[str],
    families: Sequence[Hashable],
    rules: Sequence[StepRule],
    rule: StepRule,
    *,
    alone: bool = False,
) -> Nights:
    """Return what logs of times tell of the last night; their shape is (series, nights), NaN is not measured.

    ``alone``: only whether it is above the newest level of those before it and above the newest of them, so that no
    step of theirs is held against it.
    """
    above = kinds_of(shared_course(logs), places, rule)
    logs = _on_one_level(logs, np.array([above.get(place, 0.0) for place in places]))
    course = shared_course(logs)
    known = np.isfinite(course)
    raw, variances = noise_of(logs)
    together = len(logs) >= MIN_SHARED and int(known.sum()) >= rule.min_values
    own = logs
    if together and (varied := float(course[known].var())):
        # what all share is taken from each as far as nights scatter more together than what series do not share
        share = max(0.0, 1 - float(variances.sum()) / len(logs) ** 2 / varied)
        own = logs - share * np.where(known, course, 0.0)
    noise, _ = noise_of(own)
    whole, shared = Noise(rho=max(raw.rho, noise.rho)), None

    def rises(rows: Logs, noise: Noise, rules: Sequence[StepRule]) -> list[Night]:
        # what a new place does is known where many places are
        moved = places[-1] not in places[:-1] and len({*places[:-1]}) < rule.min_values
        level = [_on_newest_level(row, rule, noise) for row, rule in zip(rows, rules, strict=True)]
        return _with_first_nights([Night(moved=moved)] * len(rows), np.array(level).reshape(rows.shape), noise, rules)

    if alone:
        each = rises(own, noise, rules)
        if together:
            [shared] = rises(course[None], whole, [rule])
            if shared.first:
                each = [one if one.first else along for one, along in zip(each, rises(logs, raw, rules), strict=True)]
        return Nights(each=tuple(each), shared=shared, above=above, noise=noise)
    steps = [_newest(row, seen, one, noise) for row, seen, one in zip(own, logs, rules, strict=True)]
    found = [Night(shift=step, sure=sure) for step, sure in zip(steps, _sure(steps, families), strict=True)]
    found = [_with_places(one, row, places) for one, row in zip(found, own, strict=True)]
    if together:
        step = newest_shift(np.exp(course[known]).tolist(), replace(rule, for_line=FOR_LINE), whole)
        shared = Night(shift=step, sure=step is not None and step.p_value <= SHARED_LEVEL)
        shared = _with_places(shared, course, places)
        if step:
            shared = replace(shared, shift=replace(step, at=int(np.flatnonzero(known)[step.at])))
        if shared.shift and shared.sure and shared.shift.slope is None:
            along = [_along(row, shared.shift, one, raw) for row, one in zip(logs, rules, strict=True)]
            both = zip(found, along, _sure(along, families), strict=True)
            found = [Night(shift=step, sure=True) if sure and not one.sure else one for one, step, sure in both]
        [shared] = _with_first_nights([shared], course[None], whole, [rule])
    return Nights(each=tuple(_with_first_nights(found, own, noise, rules)), shared=shared, above=above, noise=noise)


def _on_newest_level(row: Logs, rule: StepRule, noise: Noise) -> Logs:
    """Return a row whose nights before the last one are all of the newest level, or of the newest one's if higher."""
    row, past = row.copy(), np.flatnonzero(np.isfinite(row[:-1]))
    levels = segments(np.exp(row[past]).tolist(), rule, noise)
    for level in levels[:-1]:
        row[past[level.start : level.stop]] += math.log(levels[-1].seconds / level.seconds)
    if levels:
        row[past] += max(0.0, row[past[-1]] - float(np.median(row[past])))
    return row


def shared_course(logs: Logs) -> Logs:
    """Return by how much all series together are above their medians each night; NaN where fewer than half are."""
    course = np.full(logs.shape[1], np.nan)
    many = 2 * np.isfinite(logs).sum(axis=0) >= max(1, len(logs))
    kept = logs[np.isfinite(logs[:, many]).any(axis=1)][:, many]
    if kept.size:
        kept = kept - np.nanmedian(kept, axis=1, keepdims=True)
        middle = np.nanmedian(kept, axis=0)
        rests = kept - middle
        limit = ROBUST * np.nanmedian(np.abs(rests), axis=1, keepdims=True)
        course[many] = middle + np.nanmean(rests.clip(-limit, limit), axis=0)
    return course


def kinds_of(course: Logs, places: Sequence[str], rule: StepRule) -> dict[str, float]:
    """Return by how much (log) places are above the fastest kind of them, nothing where they are of one kind.

    A kind is a cut between places that tells nights far better than any step in time does. How much slower it is is
    seen on nights near to one another, for the level may have changed.
    """
    known = np.isfinite(course)
    names, course, nights = np.array(places)[known], course[known], np.flatnonzero(known)
    above = dict.fromkeys(sorted({*names.tolist()}), 0.0)
    near = np.abs(nights[:, None] - nights) <= NEIGHBOURS
    for _ in range(3 if len(above) > 1 else 0):
        level = course - np.array([above[name] for name in names])
        middles = {name: float(np.median(level[names == name])) for name in above}
        ordered = sorted(middles, key=middles.__getitem__)
        apart, cuts = level[:, None] - level, []
        for i in range(1, len(ordered)):
            slow = np.isin(names, ordered[i:])
            pairs = slow[:, None] & ~slow
            offset = float(np.median(apart[pairs & near] if (pairs & near).any() else apart[pairs]))
            cuts.append((rest_beside_a_step(level - offset * slow), i, offset))
        rest, i, offset = min(cuts)
        if rest > KIND_REST * rest_beside_a_step(level) or offset <= math.log1p(rule.floor):
            break
        above |= {name: above[name] + offset for name in ordered[i:]}
    return above if any(above.values()) else {}


def _on_one_level(logs: Logs, above: Logs) -> Logs:
    """Return each series' nights without what it itself takes longer on slower kinds of nodes."""
    logs, nights = logs.copy(), np.arange(len(above))
    near = np.abs(nights[:, None] - nights) <= NEIGHBOURS
    for kind in sorted({*above.tolist()} - {0.0}):
        slow, fast = np.nonzero((above == kind)[:, None] & (above == 0) & near)
        apart = logs[:, slow] - logs[:, fast]
        known = np.isfinite(apart).any(axis=1)
        offset = np.full(len(logs), kind)
        offset[known] = np.nanmedian(apart[known], axis=1)
        logs[:, above == kind] -= offset[:, None]
    return logs


def noise_of(logs: Logs) -> tuple[Noise, Logs]:
    """Return how nights scatter, one correlation of neighbouring nights for all series, and each series' variance.

    The correlation is from differences of nights one and two apart, which know no steps (Chakar, Lebarbier, Lévy-Leduc
    & Robin 2017), without outliers, and none if chance may make it; variances are moderated by their spread (Smyth
    2004).
    """
    squares, counts, wild = np.zeros((2, len(logs))), np.zeros(len(logs)), 0
    for i, row in enumerate(logs):
        values = row[np.isfinite(row)]
        if len(values) < 4:
            continue
        apart = [values[lag:] - values[:-lag] for lag in (1, 2)]
        limits = [ROBUST * float(np.median(np.abs(one))) for one in apart]
        squares[:, i] = [np.mean(one[np.abs(one) <= end] ** 2) for one, end in zip(apart, limits, strict=True)]
        # a wild night is four deviations beyond both nights next to it
        both = np.abs(apart[0][:-1] - apart[0][1:]) - np.abs(apart[0][:-1] + apart[0][1:])
        wild += int((both > 4 / 3 * math.sqrt(2) * limits[1]).sum())
        counts[i] = len(values) - 2
    moving = squares[0] > 0
    if moving.sum() < MIN_SHARED:  # a few series alone tell nothing of how nights resemble one another
        return Noise(), squares[0] / 2
    one, two = squares[:, moving]
    count, mean_count = counts[moving].sum(), counts[moving].mean()
    ratio = (two / (one + two)).sum() / (one / (one + two)).sum()
    alike = float(ratio) - 1
    rho = min(alike, 0.95) if alike > 3 / math.sqrt(count) else 0.0  # two standard errors of none
    variances = squares[0] / 2 / (1 - rho)
    share = (wild + math.sqrt(wild)) / float(counts.sum()) if wild > 9 else 0.0  # three standard errors of none
    df, variance = _moderation(variances[moving], 2 / 3 * float(mean_count))
    return Noise(rho=rho, df=df, variance=variance, wild=share), variances


def _moderation(variances: Logs, df: float) -> tuple[float, float]:
    """Return the degrees of freedom and the variance that variances of ``df`` each tell of another (Smyth 2004)."""

    def bias(of: float) -> float:  # of the logarithm of a mean square; the ends of Stirling's series, as those below
        return -1 / of - 1 / (3 * of * of)

    logs = np.log(variances)
    beyond = float(logs.var(ddof=1)) - (2 / df + 2 / df**2)
    prior_df = (1 + math.sqrt(1 + 2 * beyond)) / beyond if beyond > 0.05 else 40.0
    return prior_df, math.exp(float(logs.mean()) - bias(df) + bias(prior_df))


def _newest(own: Logs, seen: Logs, rule: StepRule, noise: Noise) -> Shift | None:
    known = np.isfinite(own)
    if not known[-1]:
        return None
    shift = newest_shift(np.exp(own[known]).tolist(), rule, noise)
    if shift and shift.slope is None:
        before, since = seen[known][: shift.at].tolist(), seen[known][shift.at :].tolist()
        change = median(since) - median(before)
        if own is not seen and (change * shift.change < 0 or abs(change) <= math.log1p(rule.floor)):
            return None  # it is the others that moved
    return shift


def _along(row: Logs, shift: Shift, rule: StepRule, noise: Noise) -> Shift | None:
    """Return the step of all series in one of them, if it has more than the floor of it."""
    before, since = (side[np.isfinite(side)].tolist() for side in (row[: shift.at], row[shift.at :]))
    if not np.isfinite(row[-1]) or min(len(before), len(since)) < 2:
        return None
    found = difference(before, since, noise)
    step = shift_of(len(before), found.value, found, found.p_beyond(0.0))
    return step if found.value * shift.change > 0 and abs(found.value) > math.log1p(rule.floor) else None


def _with_places(one: Night, row: Logs, places: Sequence[str]) -> Night:
    """Return a step as none that is sure, where the places of its nights may as well be all that changed."""
    if one.shift is None or one.shift.slope is not None:
        return one
    ran = [place for place, value in zip(places, row, strict=True) if np.isfinite(value)]
    before, since = {*ran[: one.shift.at]}, {*ran[one.shift.at :]}
    by_chance = 1 / math.comb(len(before | since), len(since))  # that all slow places come last
    moved = not before & since and by_chance > 0.05
    return replace(one, sure=one.sure and not moved, moved=moved)


def _sure(steps: Sequence[Shift | None], families: Sequence[Hashable]) -> list[bool]:
    p_values = [step.p_value if step else 1.0 for step in steps]
    sure = [False] * len(p_values)
    if min(p_values, default=1.0) > FALSE:
        return sure
    members = group_by(range(len(families)), families.__getitem__).values()
    fallen = discoveries_in_families([[p_values[i] for i in own] for own in members], q=FALSE)
    for own, fell in zip(members, fallen, strict=True):
        for i, is_sure in zip(own, fell, strict=True):
            sure[i] = is_sure
    return sure


def _with_first_nights(found: Sequence[Night], logs: Logs, noise: Noise, rules: Sequence[StepRule]) -> list[Night]:
    """Return the series with tonight's rise above their nights before, where noise surely does not make it.

    Nor may nights of any series rise so far, in their own deviations, as often as once in twenty nights.
    """
    least = NormalDist().inv_cdf(1 - FIRST_LEVEL / max(len(logs), 1))  # less than Student's t, slow to import
    told: dict[int, tuple[float, float]] = {}
    pasts: list[Logs] = []
    for i, (one, row, rule) in enumerate(zip(found, logs, rules, strict=True)):
        past = row[:-1][np.isfinite(row[:-1])]
        if len(past) < rule.min_values - 1:
            continue
        rests = past - np.median(past)
        calm = rests[np.abs(rests) <= ROBUST * np.median(np.abs(rests))]  # a wild night is not to hide the next one
        df = len(calm) - 1.0
        variance = (float((calm**2).sum()) + noise.df * noise.variance) / (df + noise.df)
        if variance == 0 or np.isnan(row[-1]):
            continue
        pasts.append(rests / math.sqrt(variance))
        above = float(row[-1] - np.median(past))
        error = math.sqrt(variance * (1 + math.pi / 2 * noise.of_sum(len(past)) / len(past)))
        if one.sure or above <= max(math.log1p(rule.floor), least * error):
            continue
        if t_tail(above / error, df + noise.df) * len(logs) <= FIRST_LEVEL:
            told[i] = above, above / math.sqrt(variance)
    every = np.concatenate(pasts) if told else np.zeros(0)
    rare = {i: above for i, (above, far) in told.items() if 20 * (every >= far).sum() <= logs.shape[1] - 1}
    return [replace(one, first=math.expm1(rare[i])) if i in rare else one for i, one in enumerate(found)]
