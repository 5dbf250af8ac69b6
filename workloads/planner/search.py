"""Every mesh that could carry a step, the rules and the memory that stop some, and the rest by predicted time. Pure.

At a fixed global batch the axes leave each data rank a number of microbatches; sizes are the divisors of the world, in
the order dp, pp, fsdp, cp, tp, outermost first, so that what talks most talks inside a node.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bench.text import UserError
from workloads.mesh.constraints import refuse_experts, refuse_heads, refuse_sequence
from workloads.planner.ask import CHECKPOINTING, Ask, Checkpointing, refusal
from workloads.planner.binding import binding_of
from workloads.planner.dry_run import DryRun, dry_run
from workloads.planner.hardware import Hardware
from workloads.planner.link_time import Seconds
from workloads.planner.models import Model
from workloads.planner.rank_memory import memory_of
from workloads.planner.stage_parts import parts_of

ORDER = ("dp", "pp", "fsdp", "cp", "tp")
MOST_GPUS = 1 << 17
_MICROBATCHES = (1, 2, 4, 8)

Mesh = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is searched for: the model, how many GPUs, and what all candidates share.

    ``microbatch`` 0 and ``checkpointing`` None try all.
    """

    model: Model
    gpus: int
    global_batch: int
    element_bytes: int = 2
    schedule: str = "1f1b"
    chunks: int = 0
    cp_method: str = "zigzag"
    microbatch: int = 0
    checkpointing: Checkpointing | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best candidates in order, what binds each, and what became of the others.

    ``without`` has, for each axis that the best one uses, the fastest candidate that does not. ``tried`` counts meshes
    with a microbatch and as much checkpointing as they need; ``refused`` those that break a rule, by its first word,
    ``equations`` one of each with its numbers; ``too_large`` those that memory stops, of which ``nearest`` lacks least.
    """

    best: tuple[DryRun, ...]
    bindings: tuple[str, ...]
    without: dict[str, DryRun | None]
    tried: int
    refused: dict[str, int]
    equations: dict[str, str]
    too_large: int
    nearest: DryRun | None


def search(wanted: Wanted, hardware: Hardware, *, top: int = 10, seconds: Seconds | None = None) -> Found:
    """Return the fastest candidates that their rules and the memory allow; the best ``top`` meshes, each once.

    ``seconds`` tells a call's time where ``hardware`` does not.
    """
    if wanted.gpus < 1 or wanted.gpus > MOST_GPUS:
        raise UserError(f"--gpus({wanted.gpus}) is not within 1 and {MOST_GPUS}")
    if wanted.global_batch < 1:
        raise UserError(f"--global-batch({wanted.global_batch}) < 1")
    refused: Counter[str] = Counter()
    equations: dict[str, str] = {}
    fitting: list[DryRun] = []
    nearest: tuple[float, Ask] | None = None
    tried = too_large = 0
    for ask in candidates(wanted):
        if fitting and _only_recomputes_more(ask, fitting[-1].ask):
            continue
        tried += 1
        reason = refusal(ask)
        if reason is not None:
            rule = _first_word(reason)
            refused[rule] += 1
            equations.setdefault(rule, f"{ask.mesh_text}: {reason}")
            continue
        needed = max(memory_of(ask, part).total for part in parts_of(ask))
        if needed > hardware.usable_bytes:
            too_large += 1
            nearest = min(nearest or (needed, ask), (needed, ask), key=_needed)
            continue
        fitting.append(dry_run(ask, hardware, seconds=seconds, exact=False))
    best = _best(fitting, top)
    return Found(
        best=best,
        bindings=tuple(binding_of(run) for run in best),
        without=_without(best[0], fitting) if best else {},
        tried=tried,
        refused=dict(refused),
        equations=equations,
        too_large=too_large,
        nearest=dry_run(nearest[1], hardware, exact=False) if nearest else None,
    )


def _first_word(reason: str) -> str:
    return re.split(r"\W+", reason.lstrip("("), maxsplit=1)[0]


def _only_recomputes_more(ask: Ask, fits: Ask) -> bool:
    """Say whether a candidate is one that fits already, but slower: what is not computed again need not be."""
    return ask.mesh is fits.mesh and ask.microbatch == fits.microbatch


def candidates(wanted: Wanted) -> Iterator[Ask]:
    """Yield every mesh with every microbatch and checkpointing that makes the global batch; rules are yet to be asked.

    What the model's own sizes forbid whatever else is chosen is left out at once: heads over tp, tokens over cp.
    """
    for mesh in meshes(wanted):
        data = mesh["dp"] * mesh["fsdp"]
        for microbatch in (wanted.microbatch,) if wanted.microbatch else _MICROBATCHES:
            if wanted.global_batch % (data * microbatch):
                continue
            for checkpointing in CHECKPOINTING if wanted.checkpointing is None else (wanted.checkpointing,):
                yield Ask(
                    model=wanted.model,
                    mesh=mesh,
                    microbatch=microbatch,
                    microbatches=wanted.global_batch // (data * microbatch),
                    element_bytes=wanted.element_bytes,
                    checkpointing=checkpointing,
                    schedule=wanted.schedule,
                    chunks=wanted.chunks,
                    cp_method=wanted.cp_method,
                )


def meshes(wanted: Wanted) -> Iterator[Mesh]:
    """Yield the meshes whose product is the GPUs, with every ``ep`` that divides the experts."""
    shape, experts = wanted.model.shape, wanted.model.num_experts
    for tp in divisors(wanted.gpus):
        if refuse_heads(shape, {"tp": tp}, experts=experts > 0):
            continue
        for cp in divisors(wanted.gpus // tp):
            if refuse_sequence(shape, {"cp": cp, "tp": tp}, cp_method=wanted.cp_method):
                continue
            for pp in divisors(wanted.gpus // tp // cp):
                if shape.layers % pp:
                    continue
                data = wanted.gpus // tp // cp // pp
                for fsdp in divisors(data):
                    mesh = {"dp": data // fsdp, "pp": pp, "fsdp": fsdp, "cp": cp, "tp": tp}
                    yield from _with_experts(mesh, experts)


def _with_experts(mesh: Mesh, experts: int) -> Iterator[Mesh]:
    if not experts:
        yield mesh
        return
    for ep in divisors(experts):
        if not refuse_experts({**mesh, "ep": ep}, experts):
            yield {**mesh, "ep": ep}


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _needed(candidate: tuple[float, Ask]) -> float:
    return candidate[0]


def _best(runs: list[DryRun], top: int) -> tuple[DryRun, ...]:
    """Return the fastest of each mesh; of equals the simpler, which has fewer axes and recomputes less."""
    best: dict[str, DryRun] = {}
    for run in sorted(runs, key=_rank):
        best.setdefault(run.ask.mesh_text, run)
        if len(best) == top:
            break
    return tuple(best.values())


def _without(best: DryRun, runs: list[DryRun]) -> dict[str, DryRun | None]:
    used = [name for name, size in best.ask.mesh.items() if size > 1]
    return {
        name: min((run for run in runs if run.ask.mesh.get(name, 1) == 1), key=_rank, default=None) for name in used
    }


def _rank(run: DryRun) -> tuple[float, int, int, float]:
    """Order by step time to three digits, then by axes, then by what is computed again, then by memory."""
    axes = sum(size > 1 for size in run.ask.mesh.values())
    again = CHECKPOINTING.index(run.ask.checkpointing)
    return float(f"{run.time.seconds:.3g}"), axes, again, run.fullest.memory.total
