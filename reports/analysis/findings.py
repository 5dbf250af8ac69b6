"""What to look at first: findings with what each costs, how sure it is, and the command to type next. Pure.

A cost is the share of a step's time that it takes, or of an operation's over all its sizes. What only one of several
repetitions tells, or what chance makes as easily, is not claimed; what a single repetition tells counts half.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

from parbench.bench.plan.params import Value
from parbench.bench.results.formatting import (
    format_bytes,
    format_case_size,
    format_percent,
    format_quantity,
    format_seconds,
)
from parbench.bench.results.stats import median
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.contrasts import OF_GROUP, Grouped, Pairs, contrasts, slow_down
from parbench.reports.analysis.fits import Curve, size_of
from parbench.reports.analysis.labels import operation, row_label, short_labels
from parbench.reports.analysis.summary import Row, num_ranks
from parbench.reports.analysis.verdicts import noisy_of
from parbench.reports.repetitions import describe_host_disturbance
from parbench.reports.stragglers import Straggler, find_last_rank, find_late_rank
from parbench.reports.tables.pipelines import PipelineResult
from parbench.reports.tables.step_communication import get_calls
from parbench.reports.tables.step_parts import (
    find_worst_bytes_ratio,
    get_profiled_seconds,
    sum_exposed_communication,
)
from parbench.reports.timelines import find_slow_computing_rank

Kind = Literal[
    "late rank", "slow rank", "slow link", "slow group", "one bucket", "no prefetch", "small microbatches",
    "uneven stages", "pipeline bubble", "hot experts", "exposed communication", "dearer than a whole", "off its fit",
    "slower beside others", "unexpected bytes", "busy machine", "host-bound", "copies",
]  # fmt: skip
MOST, _MOST_NAMED = 6, 3
USUAL: Mapping[str, Value] = {
    "shape": "tiny", "microbatch": 4, "bucket_mb": 0.0, "schedule": "1f1b", "ep": 0, "top_k": 2, "capacity": 0.0,
    "variant": "all_to_all", "cp_method": "ring",
}  # fmt: skip
"""What all steps take unless they are told otherwise, which a command need not say."""
_LEAST_BUCKET_BYTES = 1 << 18  # less is not worth dividing
_LEAST, _LEAST_EXPOSED, _LEAST_IDLE, _LEAST_BUBBLE = 0.05, 0.2, 0.25, 0.15
_SLOW_LINK, _SLOW_GROUP, _OFF_RATIO, _DEARER = 0.7, 0.9, 0.01, 1.1
_WHOLES = dict.fromkeys(("reduce_scatter", "all_gather", "broadcast", "reduce"), "all_reduce")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence with its figures, and the command that tells more or mends it; ``evidence`` is what it was made of.

    ``sure`` is 1 where repetitions agree, less where one alone tells.
    """

    kind: Kind
    cost: float
    sentence: str
    command: str = ""
    sure: float = 1.0
    evidence: Mapping[str, object]

    @property
    def words(self) -> str:
        return f"{self.sentence} -> {self.command}" if self.command else self.sentence


def look_at_first(found: Analysis) -> tuple[Finding, ...]:
    """Return at most six findings, one of a kind and operation, those first that surely cost most."""
    links, groups = (
        (_slow_links(found, matrix) for matrix in found.matrices),
        map(_slow_group, found.groups),
    )
    every = chain(
        _ranks(found), _steps(found), *links, *groups, _operations(found), _machine(found)
    )
    return tuple(sorted(every, key=lambda one: -one.cost * one.sure)[:MOST])


def _sure(row: Row) -> float:
    return 1.0 if row.repetitions > 1 else 0.5


def _run(found: Analysis, row: Row, **changed: object) -> str:
    """Return the command that measures the row's case again with other settings, none where the run has them.

    None either where the case does not take the settings, as a step of one's own may not.
    """
    if row.case.is_custom and not changed.keys() <= row.case.all_params.keys():
        return ""
    unset = dict.fromkeys(changed)
    like = [
        one for one in found.steps if one.case.name == row.case.name and one.case.id != row.case.id
    ]
    if any({**one.case.all_params, **unset} == {**row.case.all_params, **unset} for one in like):
        return ""
    kept = {name: value for name, value in row.case.params.items() if USUAL.get(name) != value}
    told = {
        name: f"{value:g}" if isinstance(value, float) else value
        for name, value in (kept | changed).items()
    }
    known, nproc = (
        ((found.run.info.environment or {}).get("process") or {}).get("cores"),
        found.run.info.plan.nproc,
    )
    cores = known or nproc
    ranks = f" --nproc {nproc}" * (
        found.run.info.plan.device == "cpu" and nproc != max(2, min(8, cores))
    )
    settings = " ".join(f"--set {name}={value}" for name, value in told.items())
    what = f"--target {row.case.target}" if row.case.is_custom else f"--only {row.case.short_name}"
    return f"parbench run {what} {settings}{ranks}"


def _ranks(found: Analysis) -> Iterator[Finding]:
    # whose ranks have unlike work by design
    rows = (one.result for of in (found.pipelines, found.mixtures, found.contexts) for one in of)
    unlike = {row.case.id for row in rows}
    alike = [row for row in found.shown if row.case.id not in unlike]

    def doctor(rank: int) -> str:
        return (
            f"{f'srun --nodelist {found.nodes.hosts[rank]} ' if found.nodes else ''}parbench doctor"
        )

    told: tuple[tuple[Kind, str, Straggler | None], ...] = (
        ("late rank", "arrives last", find_late_rank(alike)),
        ("slow rank", "is done last", find_last_rank(found.run, alike)),
    )
    for kind, verb, blame in told:
        if blame:
            share, seconds = min(blame.time_share, 1.0), format_seconds(blame.seconds)
            yield Finding(
                kind=kind,
                cost=share,
                sentence=f"Rank {blame.rank} {verb} in {blame.repetition_share}, by {seconds} (median of cases),"
                f" {format_percent(share)} of their time",
                command=doctor(blame.rank),
                evidence=asdict(blame),
            )
    for row in found.steps:
        waited = (row.value("straggler_wait") or 0.0) / (row.seconds or math.inf)
        # traces are read only where ranks wait for each other at all
        if (
            row.case.id not in unlike
            and waited >= _LEAST
            and (blame := find_slow_computing_rank(found.run, row))
        ):
            name = short_labels(found.steps)[row.case.id]
            yield Finding(
                kind="slow rank",
                cost=waited,
                sentence=f"Rank {blame.rank} computes {blame.time_share:.2f} times as long as the others in"
                f" {blame.repetition_share} of {name}, which wait {format_percent(waited)} of the step for it",
                command=doctor(blame.rank),
                evidence=asdict(blame),
            )


def _steps(found: Analysis) -> Iterator[Finding]:
    names, in_pipelines = (
        short_labels(found.steps),
        {one.result.case.id: one for one in found.pipelines},
    )
    every = list[Finding]()
    for row in found.steps:
        pipeline, wall = in_pipelines.get(row.case.id), get_profiled_seconds(row)
        hot = [*_hot_experts(found, row, names[row.case.id])]
        every += [*hot, *_bytes(row, names[row.case.id])]
        if wall and pipeline:
            every += _of_pipeline(found, pipeline, wall, names[row.case.id])
        elif wall and not hot:  # which others wait for in communication
            every += _of_communication(found, row, wall, names[row.case.id])
    groups: dict[str, dict[object, Finding]] = {}
    for one in sorted(every, key=lambda one: -one.cost * one.sure):
        groups.setdefault(one.kind, {}).setdefault(one.evidence["step"], one)
    for first, *more in (of.values() for of in groups.values()):
        also = ", ".join(
            f"{names[str(one.evidence['step'])]} {format_percent(one.cost)}"
            for one in more[:_MOST_NAMED]
        )
        left = f" and {len(more) - _MOST_NAMED} more" if len(more) > _MOST_NAMED else ""
        yield replace(
            first, sentence=f"{first.sentence}; also {also}{left}" if more else first.sentence
        )


def _of_communication(found: Analysis, row: Row, wall: float, name: str) -> Iterator[Finding]:
    """Tell the first cause that a step's own settings give for exposed communication, else only that it is exposed."""
    exposed, whole = sum_exposed_communication(row), row.case.all_params
    share = (exposed or 0.0) / wall
    told = f"{format_percent(share)} of the step is exposed"
    finding = partial(Finding, sure=_sure(row), evidence={"step": row.case.id, "exposed": share})
    own = row.case.is_custom
    each, idle = int(_set(row, "microbatches")), (row.value("idle") or 0.0) / wall
    summed = [call for call in get_calls(row) or () if call.op in ("all_reduce", "reduce_scatter")]
    sums = each if whole.get("no_sync") is False else 1
    if sums > 1 and share >= _LEAST:
        sentence = f"{name} sums gradients after each of its {each} microbatches: {told}"
        command = _run(found, row, microbatches=each, no_sync="false,true")
        cost = share * (each - 1) / each
        yield finding(kind="small microbatches", cost=cost, sentence=sentence, command=command)
    elif (
        (own or "bucket_mb" in whole)
        and share >= _LEAST
        and sum(call.count for call in summed) == sums
        and (num_bytes := summed[0].num_bytes) >= _LEAST_BUCKET_BYTES
    ):
        smaller = f"{2.0 ** round(math.log2(num_bytes / 2**22)):g}"
        sentence = f"{name} sends all gradients ({format_bytes(num_bytes)}) in one bucket after backward, where"
        command = _run(found, row, bucket_mb=f"{smaller},{_set(row, 'bucket_mb'):g}")
        asked = f"; with DDP, bucket_cap_mb={smaller} makes several" if own and not command else ""
        sentence += f" nothing hides them: {told}{asked}"
        yield finding(kind="one bucket", cost=share, sentence=sentence, command=command)
    elif (
        whole.get("prefetch") == "default" and row.value("bytes_sent.fsdp") and share >= 2 * _LEAST
    ):
        sentence = f"{name} gathers parameters without explicit prefetch: {told}"
        command = _run(found, row, prefetch="default,explicit")
        yield finding(kind="no prefetch", cost=share, sentence=sentence, command=command)
    elif share >= _LEAST_EXPOSED:
        overlap = row.value("overlap")
        hidden = (
            f", {format_percent(overlap)} of its communication hidden"
            if overlap is not None
            else ""
        )
        yield finding(kind="exposed communication", cost=share, sentence=f"{name}: {told}{hidden}")
    if idle >= _LEAST_IDLE and whole.get("compute", "real") == "real":
        size = int(_set(row, "microbatch"))
        sentence = f"{name} computes and sends nothing in {format_percent(idle)} of the step: its pieces are too small"
        command = _run(found, row, microbatch=f"{size},{4 * size}")
        yield finding(kind="small microbatches", cost=idle, sentence=sentence, command=command)


def _of_pipeline(found: Analysis, one: PipelineResult, wall: float, name: str) -> Iterator[Finding]:
    row, details = one.result, one.details
    lost = {
        cause: (row.value(f"idle_{cause}") or 0.0) / wall
        for cause in ("schedule", "imbalance", "p2p")
    }
    finding = partial(Finding, sure=_sure(row), evidence={"step": row.case.id, **lost})
    uneven, layers = row.metrics.get("idle_imbalance"), details.layers_by_stage or ()
    is_told = uneven is not None and (uneven.low is None or uneven.low > 0)
    if lost["imbalance"] >= _LEAST and is_told:
        split, even = "+".join(map(str, layers)), sum(layers) // max(len(layers), 1)
        is_even = len(set(layers)) < 2 or sum(layers) % len(layers)
        better = (
            ""
            if is_even
            else _run(found, row, split=f"{split},{'+'.join([str(even)] * len(layers))}")
        )
        share = format_percent(lost["imbalance"])
        sentence = f"{name}: uneven stages ({split or 'unknown'} layers) cost {share} of the step"
        yield finding(
            kind="uneven stages", cost=lost["imbalance"], sentence=sentence, command=better
        )
    if lost["schedule"] >= _LEAST_BUBBLE:
        count, more = details.microbatches, 4 * details.microbatches
        waited = f"{name}: ranks wait for {format_percent(lost['schedule'])} of the step"
        sentence = f"{waited} as it has only {count} microbatches on {details.ranks} ranks"
        command = _run(found, row, microbatches=f"{count},{more}")
        yield finding(
            kind="pipeline bubble", cost=lost["schedule"], sentence=sentence, command=command
        )
    if lost["p2p"] >= _LEAST:
        size = int(_set(row, "microbatch"))
        sentence = f"{name}: messages between stages cost {format_percent(lost['p2p'])} of the step, its microbatches"
        command = _run(found, row, microbatch=f"{size},{4 * size}")
        yield finding(
            kind="small microbatches",
            cost=lost["p2p"],
            sentence=f"{sentence} are too small",
            command=command,
        )


def _set(row: Row, name: str) -> float:
    """Return a setting that is a number, 1 where it is none."""
    return value if isinstance(value := row.case.all_params.get(name), int | float) else 1


def _hot_experts(found: Analysis, row: Row, name: str) -> Iterator[Finding]:
    factor = row.metrics.get("imbalance_slowdown")
    share = 1 - 1 / factor.value if factor and factor.value else 0.0
    if factor is None or share < _LEAST or (factor.low is not None and factor.low <= 1):
        return
    fullest, capacity = row.value("imbalance.rank"), row.case.all_params.get("capacity")
    told = f": the fullest rank gets {fullest:.2f} times the mean" if fullest else ""
    yield Finding(
        kind="hot experts",
        cost=share,
        sentence=f"{name}: hot experts cost {format_percent(share)} of the step{told}",
        command=_run(found, row, capacity="0,1.25") if capacity == 0 else "",
        sure=_sure(row),
        evidence={"step": row.case.id, "slowdown": factor.value},
    )


def _bytes(row: Row, name: str) -> Iterator[Finding]:
    axis, ratio = find_worst_bytes_ratio(row) or ("", 1.0)
    if ratio > 0 and abs(ratio - 1) > _OFF_RATIO:
        yield Finding(
            kind="unexpected bytes",
            cost=abs(1 - min(ratio, 1 / ratio)),
            sentence=f"{name} sends {ratio:.3f} times the bytes on {axis} that theory expects",
            evidence={"step": row.case.id, "ratio": ratio},
        )


def _slow_links(found: Analysis, matrix: Pairs) -> Iterator[Finding]:
    """Hold each link against those that are as far: that nodes lie farther apart than cores is no finding.

    Where all links of a rank are slow, it is the rank's own. A link is slow if it is so in most repetitions.
    """
    nodes, by_distance, blamed = found.nodes, dict[str, dict[tuple[int, int], float]](), set[int]()
    for pair in matrix.rows:
        distance = nodes.get_distance(*pair) if nodes and max(pair) < len(nodes.hosts) else ""
        if rate := matrix.rate(*pair):
            by_distance.setdefault(distance, {})[pair] = rate
    for distance, rates in by_distance.items():
        rates = {pair: rate for pair, rate in rates.items() if not blamed & {*pair}}
        of_rank = {rank: [pair for pair in rates if rank in pair] for rank in matrix.ranks}
        for rank, own in of_rank.items():
            others = [rate for pair, rate in rates.items() if rank not in pair]
            usual = median(others) if others else 0.0
            if (
                own
                and len(matrix.ranks) > 2
                and all(_is_slow(matrix, pair, rates, usual) for pair in own)
            ):
                names, slow = (
                    f"All links of rank {rank} reach",
                    median([rates[pair] for pair in own]),
                )
                blamed.add(rank)
                break
        else:
            usual = median(list(rates.values())) if rates else 0.0
            slow_ones = sorted(
                (rate, pair) for pair, rate in rates.items() if _is_slow(matrix, pair, rates, usual)
            )
            if not slow_ones:
                continue
            slow, (a, b) = slow_ones[0]
            names = f"The link from rank {a} to {b}"
            names += f" and {len(slow_ones) - 1} more reach" if len(slow_ones) > 1 else " reaches"
        where = f", {distance}" if distance else ""
        yield Finding(
            kind="slow link",
            cost=1 - slow / usual,
            sentence=f"{names} {format_quantity(slow, 'B/s')}, others {format_quantity(usual, 'B/s')} (median{where})",
            command="parbench slurm screen"
            if nodes
            else "parbench run --only matrix --repetitions 5",
            sure=_sure(matrix.first),
            evidence={"rate": slow, "median": usual},
        )


def _is_slow(
    matrix: Pairs, pair: tuple[int, int], rates: Mapping[tuple[int, int], float], usual: float
) -> bool:
    """Say whether a link is below 70 % of the usual rate, over all repetitions and in three of four of them."""
    if rates[pair] >= _SLOW_LINK * usual:
        return False
    known = matrix.rows[pair].by_repetition("busbw").values()
    return 4 * sum(rate < _SLOW_LINK * usual for rate in known) >= 3 * len(known)


def _slow_group(one: Grouped) -> Iterator[Finding]:
    """Hold each group against those of its kind: one across nodes has other links than one within."""
    name = f"{operation(one.first.case, OF_GROUP)} {format_case_size(size_of(one.first))}"
    for kind in dict.fromkeys(row.case.params["group"] for row in one.rows.values()):
        rows = {name: row for name, row in one.rows.items() if row.case.params["group"] == kind}
        slowest = Grouped(rows=rows).slowest
        rates = [
            rate for name, row in rows.items() if name != slowest and (rate := row.value("busbw"))
        ]
        slow = rows[slowest].value("busbw") if slowest else None
        if slow is not None and slowest and rates and slow < _SLOW_GROUP * (usual := median(rates)):
            yield Finding(
                kind="slow group",
                cost=1 - slow / usual,
                sentence=f"Group {slowest} reaches {format_quantity(slow, 'B/s')} in {name}, the other groups"
                f" {format_quantity(usual, 'B/s')} (median)",
                sure=_sure(rows[slowest]),
                evidence={"group": slowest, "rate": slow, "median": usual},
            )


def _operations(found: Analysis) -> Iterator[Finding]:
    yield from chain.from_iterable(map(_off_fit, found.curves))
    yield from _dearer(found.communication)
    beside = [
        (
            factor.value,
            f"{row_label(one.base)} takes {factor.value:.2f} times as long {prefix}{load}",
        )
        for _, prefix, rows in contrasts(found.shown)
        for one in rows
        for load, factor in one.factors.items()
        if factor.value and factor.low is not None and factor.low > 1
    ]
    for factor, sentence in sorted(beside, reverse=True)[:1]:
        sentence += f"; {len(beside) - 1} more do" if len(beside) > 1 else ""
        yield Finding(
            kind="slower beside others",
            cost=1 - 1 / factor,
            sentence=sentence,
            evidence={"factor": factor},
        )


def _off_fit(curve: Curve) -> Iterator[Finding]:
    """Name the size that takes most beyond its fit, in three of four repetitions by a fifth as the fit itself asks."""
    whole = sum(row.value("time") or 0.0 for row in curve.rows)
    found = list[tuple[float, Row, float]]()
    for size, error in curve.fit.outliers:
        row = next(row for row in curve.rows if size_of(row) == size)
        above = sum(
            time > 1.2 * curve.fit.predict(size) for time in row.by_repetition("time").values()
        )
        if error > 0 and 4 * above >= 3 * row.repetitions:
            found.append(((row.value("time") or 0.0) - curve.fit.predict(size), row, error))
    for seconds, row, error in sorted(found, key=lambda one: -one[0])[:1]:
        name, size = row.case.short_name, size_of(row)
        told = f"{format_seconds(row.value('time'))}, {format_seconds(curve.fit.predict(size))} by the fit"
        if seconds >= _LEAST * whole:
            yield Finding(
                kind="off its fit",
                cost=seconds / whole,
                sentence=f"{row_label(row)} takes {100 * error:.0f} % longer than its fitted curve ({told})",
                command=f"parbench run --only {name} --sizes "
                f"{format_case_size(size // 4)}:{format_case_size(4 * size)}:x2",
                sure=_sure(row),
                evidence={"case": row.case.id, "error": error},
            )


def _dearer(rows: Sequence[Row]) -> Iterator[Finding]:
    """Name operations that take longer than one which does their work and more, by an interval over repetitions."""
    series = dict[str, list[tuple[Row, Row]]]()

    def key(row: Row, name: str) -> tuple[object, ...]:
        return name, num_ranks(row), row.world, *sorted(map(str, row.case.params.items()))

    wholes = {key(row, row.case.short_name): row for row in rows}
    for row in rows:
        name = row.case.short_name
        if name in _WHOLES and (whole := wholes.get(key(row, _WHOLES[name]))):
            series.setdefault(name, []).append((row, whole))
    for of in series.values():
        told = [
            (row, whole)
            for row, whole in of
            if (ratio := slow_down(whole, row)) and (ratio.low or 0.0) > _DEARER
        ]
        beyond = [
            ((row.seconds or 0.0) - (whole.seconds or 0.0), row, whole) for row, whole in told
        ]
        for _, row, whole in sorted(beyond, key=lambda one: -one[0])[:1]:
            name, other = (one.case.short_name for one in (row, whole))
            times = f"{format_seconds(row.seconds)}, {other} {format_seconds(whole.seconds)}"
            yield Finding(
                kind="dearer than a whole",
                cost=sum(one for one, *_ in beyond) / sum(one.seconds or 0.0 for one, _ in of),
                sentence=f"{row_label(row)} takes {times}, which does its work and more: it should cost less",
                command=f"parbench run --only {name} --only {other} "
                f"--sizes {format_case_size(size_of(row))} --repetitions 10",
                evidence={"case": row.case.id, "whole": whole.case.id},
            )


def _machine(found: Analysis) -> Iterator[Finding]:
    """Name other work beside half of the repetitions, or beside any if repetitions scatter; the doctor's is the
    verdict's."""
    repetitions, others, noisy = (
        found.run.info.repetitions,
        describe_host_disturbance(found.run),
        noisy_of(found.shown),
    )
    beside = sum(bool(one.load and one.load.disturbance) for one in repetitions)
    if others and (noisy or 2 * beside >= len(repetitions)):
        scatter = (
            median([row.variation for row in found.shown if row.variation is not None])
            if noisy
            else 0.0
        )
        told = (
            f"Repetitions scatter by {format_percent(scatter)} beside"
            if noisy
            else "Repetitions ran beside"
        )
        yield Finding(
            kind="busy machine",
            cost=min(max(scatter, _LEAST), 1.0),
            sentence=f"{told} other work: {others}",
            command="parbench doctor",
            evidence={"scatter": scatter, "repetitions": beside},
        )
