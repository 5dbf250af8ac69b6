"""Dry runs, searches and claims as text: what is asked, then memory, axes, the step, what was assumed. Pure."""

from collections.abc import Sequence

from bench.results.details import COMPONENTS, Published
from workloads.planner.dry_run import DryRun
from workloads.planner.formulas import Formula, formulas_of
from workloads.planner.hardware import Hardware
from workloads.planner.published import Claim
from workloads.planner.rationale import rationale
from workloads.planner.search import Found


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return aligned columns, the first ``left`` of them to the left."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(_line(row, widths, left) for row in (head, *rows))


def _line(row: Sequence[str], widths: Sequence[int], left: int) -> str:
    cells = [
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def dry_run_text(run: DryRun, notes: Sequence[str] = ()) -> str:
    """Return all that a dry run says."""
    ask = run.ask
    batch = (
        f"{ask.model.name} on {ask.world} GPUs ({run.hardware.name}), mesh {ask.mesh_text}: global batch "
        f"{ask.global_batch} = {ask.dp * ask.fsdp} data ranks x {ask.microbatches} microbatches x {ask.microbatch}, "
        f"sequence {ask.model.shape.sequence}, checkpointing {ask.checkpointing}, schedule {ask.schedule}"
    )
    parts = [
        f"Predicted, not measured: {batch}",
        _memory(run),
        _axes(run),
        _step(run),
        assumptions(run.hardware, ask.element_bytes, notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _memory(run: DryRun) -> str:
    unit, factor = ("GB", 1e9) if run.fullest.memory.total >= 1e9 else ("MB", 1e6)
    rows = [
        [
            held.part.words,
            *(f"{getattr(held.memory, name) / factor:.2f}" for name in COMPONENTS),
            f"{held.memory.total / factor:.2f}",
        ]
        for held in run.ranks
    ]
    used = run.fullest.memory.total / run.hardware.usable_bytes
    verdict = f"{used:.0%} of {run.hardware.usable_bytes / 1e9:.1f} GB usable a GPU"
    return table([f"memory, {unit} a rank", *COMPONENTS, "total"], rows) + f"\n{verdict}"


def _axes(run: DryRun) -> str:
    rows = [
        [
            axis.name,
            axis.where,
            axis.assumption,
            _size(axis.sent_bytes),
            duration(axis.seconds),
            duration(axis.hidden_seconds),
            duration(axis.exposed_seconds),
        ]
        for axis in run.time.axes
    ]
    head = ["axis", "where", "exposed", "sent a rank", "takes", "hidden", "adds"]
    return table(head, rows, left=3) if rows else ""


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3f} MB"


def _step(run: DryRun) -> str:
    time = run.time
    parts = [
        ("compute", time.compute_seconds),
        *((f"exposed {axis.name}", axis.exposed_seconds) for axis in time.axes if axis.exposed_seconds),
        ("bubble", time.bubble_seconds),
        ("update", time.update_seconds),
    ]
    rows = [[name, duration(seconds), f"{seconds / time.seconds:.1%}"] for name, seconds in parts]
    rows.append(["step", duration(time.seconds), "100.0%"])
    bubble = f"bubble: {time.bubble_method}\n" if run.ask.pp > 1 else ""
    return (
        table(["step of the busiest rank", "time", "share"], rows)
        + f"\n{bubble}{run.tokens_per_second:,.0f} tokens/s, {run.tokens_per_second / run.ask.world:,.0f} a GPU, "
        f"{run.model_flops_per_second / 1e12:.4g} TFLOP/s a GPU, MFU {run.mfu:.1%}"
        + "".join(f"\n{caveat}" for caveat in run.caveats)
    )


def assumptions(hardware: Hardware, element_bytes: int, notes: Sequence[str] = ()) -> str:
    """Return the numbers that nobody measured."""
    e = hardware.efficiency
    hides = ", ".join(f"{name} {share:.0%}" for name, share in e.overlap.items())
    lines = [
        f"matrix products, and attention's half that no mask hides, at {e.gemm:.0%} of "
        f"{hardware.flops_per_second / 1e12:.4g} TFLOP/s"
        + ("" if element_bytes == 2 else f" * {hardware.float32_share:g} for float32"),
        *_links(hardware),
        f"memory at {e.memory_rate:.0%} of {hardware.memory_bytes_per_second / 1e12:.4g} TB/s, {e.memory:.0%} of "
        f"{hardware.memory_bytes / 1e9:.4g} GB usable",
        f"of communication that could hide does: {hides or 'none'}",
        f"hardware: {hardware.source}",
        *notes,
    ]
    return "Assumed:\n" + "\n".join(f"  {line}" for line in lines)


def _links(hardware: Hardware) -> list[str]:
    if hardware.links_from:
        return [f"links: {hardware.links_from}"]
    e = hardware.efficiency
    return [
        f"links at {e.links_inside:.0%} of {hardware.inside_bytes_per_second / 1e9:.4g} GB/s inside a node of "
        f"{hardware.gpus_per_node}, {e.links_across:.0%} of {hardware.across_bytes_per_second / 1e9:.4g} GB/s a card "
        "across",
        f"launch {hardware.launch_seconds * 1e6:.3g} us, hop {hardware.inside_hop_seconds * 1e6:.3g} us inside, "
        f"{hardware.across_hop_seconds * 1e6:.3g} us across",
    ]


def formulas_text(run: DryRun) -> str:
    """Return every formula with its numbers and source."""
    return "\n".join(_formula(formula) for formula in formulas_of(run))


def _formula(formula: Formula) -> str:
    return (
        f"{formula.name} = {formula.equation}\n  = {formula.numbers}\n  = {formula.value:,.4g} {formula.unit}".rstrip()
        + f"   [{formula.source}]"
    )


def search_text(found: Found, wanted_words: str, notes: Sequence[str] = ()) -> str:
    """Return the best candidates, what binds each, and why the best is the best."""
    rows = [
        [
            run.ask.mesh_text,
            str(run.ask.microbatch),
            str(run.ask.microbatches),
            run.ask.checkpointing,
            binding,
            duration(run.time.seconds),
            f"{run.tokens_per_second:,.0f}",
            f"{run.mfu:.1%}",
            f"{run.fullest.memory.total / 1e9:.1f}",
        ]
        for run, binding in zip(found.best, found.bindings, strict=True)
    ]
    head = ["mesh", "microbatch", "microbatches", "checkpointing", "bound by", "step", "tokens/s", "MFU", "GB"]
    best = found.best[0]
    return "\n\n".join(
        [
            f"Predicted, not measured: {wanted_words}; {found.tried} candidates, {found.too_large} too large, "
            f"{sum(found.refused.values())} refused by a rule",
            "\n".join([table(head, rows, left=5), *caveats_of(found)]),
            "Why the first:\n" + "\n".join(f"  {line}" for line in rationale(found)),
            assumptions(best.hardware, best.ask.element_bytes, notes),
        ]
    )


def caveats_of(found: Found) -> list[str]:
    """Return what a reader must know of the best candidates' numbers, each with its mesh."""
    return [f"{run.ask.mesh_text}: {caveat}" for run in found.best for caveat in run.caveats]


def claims_text(claims: Sequence[Claim]) -> str:
    """Return quoted numbers beside predicted ones, group by group."""
    rows = [
        [claim.group, claim.what, claim.source, _number(claim, claim.quoted), _number(claim, claim.predicted)]
        for claim in claims
    ]
    return table(["published", "", "source", "quoted", "predicted"], rows, left=3)


def published_text(found: Sequence[Published]) -> str:
    """Return the same as a run's validation has them, and what they are not."""
    rows = [[one.name, one.source, _number(one, one.quoted), _number(one, one.predicted)] for one in found]
    return "Of declared hardware, not of this machine:\n" + table(
        ["published", "source", "quoted", "predicted"], rows, left=2
    )


def _number(claim: Claim | Published, value: float) -> str:
    return f"{value:.3g} {claim.unit}" if claim.unit else f"{value:.4f}"


def duration(seconds: float) -> str:
    """Return seconds in the unit in which they have few digits."""
    if seconds == 0:
        return "0"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
