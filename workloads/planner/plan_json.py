"""Dry runs, searches and claims as JSON: the same numbers as the text, in SI units. Pure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from workloads.planner.dry_run import DryRun
from workloads.planner.formulas import formulas_of
from workloads.planner.published import Claim
from workloads.planner.rationale import rationale
from workloads.planner.search import Found


def as_line(value: object) -> str:
    """Return one line of JSON."""
    return msgspec.json.encode(value).decode()


def dry_run_json(run: DryRun, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return a dry run; every number is predicted."""
    ask, time = run.ask, run.time
    return {
        "kind": "dry-run",
        "predicted": True,
        "model": ask.model.name,
        "gpus": ask.world,
        "mesh": dict(ask.mesh),
        "microbatch": ask.microbatch,
        "microbatches": ask.microbatches,
        "global_batch": ask.global_batch,
        "sequence": ask.model.shape.sequence,
        "element_bytes": ask.element_bytes,
        "checkpointing": ask.checkpointing,
        "schedule": ask.schedule,
        "fits": run.fits,
        "memory_bytes": [
            {"rank": held.part.words, **asdict(held.memory), "total": held.memory.total} for held in run.ranks
        ],
        "usable_bytes": run.hardware.usable_bytes,
        "step_seconds": time.seconds,
        "compute_seconds": time.compute_seconds,
        "update_seconds": time.update_seconds,
        "bubble_seconds": time.bubble_seconds,
        "bubble_method": time.bubble_method,
        "axes": {axis.name: {key: value for key, value in asdict(axis).items() if key != "name"} for axis in time.axes},
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.mfu,
        "hardware": msgspec.to_builtins(run.hardware),
        "formulas": [asdict(formula) for formula in formulas_of(run)],
        "notes": [*run.caveats, *notes],
    }


def search_json(found: Found, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the best candidates as dry runs, each with what binds it."""
    return {
        "kind": "search",
        "predicted": True,
        "tried": found.tried,
        "too_large": found.too_large,
        "refused": found.refused,
        "best": [
            {**dry_run_json(run), "bound_by": binding} for run, binding in zip(found.best, found.bindings, strict=True)
        ],
        "why": list(rationale(found)),
        "notes": list(notes),
    }


def claims_json(claims: Sequence[Claim]) -> dict[str, Any]:
    """Return quoted numbers beside predicted ones."""
    return {"kind": "published", "claims": [asdict(claim) for claim in claims]}
