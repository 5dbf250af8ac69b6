"""What ``parbench plan`` was asked, answered: text or one line of JSON, and the exit code."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from parbench.bench.files import encode_json, write_output
from parbench.bench.results.details import PLAN_FILE
from parbench.bench.results.document import Document
from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError, format_choices
from parbench.workloads.context_parallel.context_methods import CONTEXT_METHODS
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import PRECISIONS
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.pipeline_parallel.pipeline_case import PipelineOptions
from parbench.workloads.pipeline_parallel.schedules import DEFAULT_SCHEDULE, find_schedule
from parbench.workloads.planner.candidates import Wanted, place_step
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import Hardware, hardware_of
from parbench.workloads.planner.lacking import lack_of, require_found
from parbench.workloads.planner.link_time import (
    MESSAGES,
    Seconds,
    by_curves,
    curves_of,
    hardware_of_run,
)
from parbench.workloads.planner.measured.calibration import calibrated
from parbench.workloads.planner.models import find_model, model_of
from parbench.workloads.planner.report import render
from parbench.workloads.planner.report.plan_page import (
    dry_run_document,
    search_document,
    with_variants,
)
from parbench.workloads.planner.search import search
from parbench.workloads.planner.state_widths import parse_widths


@dataclass(frozen=True, kw_only=True)
class Given:
    """The options of the command, as they came; what was not given is None or 0."""

    model: str | None = None
    gpus: int = 0
    mesh: str | None = None
    microbatch: int | None = None
    microbatches: int = 0
    global_batch: int = 0
    sequence: int = 0
    precision: str = "bfloat16"
    schedule: str = ""
    chunks: int = 0
    split: str = ""
    checkpointing: str = ""
    cp_method: str = ""
    zero: int | None = None
    state: str = ""
    hardware: str | None = None
    fits: Path | None = None
    calibrate: tuple[Path, ...] = ()
    top: int = 10
    explain: bool = False
    validate: Path | None = None
    as_json: bool = False
    output: Path | None = None
    guide: bool = False


_MOST_POINTS = 30
DEFAULT_HARDWARE = "h100"
Machine = tuple[Hardware, Seconds | None, tuple[str, ...]]
"""The hardware, a call's time where a run tells it, and what a reader must know of both."""


class Answer(NamedTuple):
    """What goes to stdout, or to be shown; and the sentence that ends the command with code 2, if any."""

    text: str = ""
    problem: str = ""
    document: Document | None = None


def answer(given: Given) -> Answer:
    """Return the answer; ``UserError`` where the question has none."""
    if given.validate is not None:
        if given.output:
            raise UserError(
                "-o does not go with --validate, which prints text or --json and writes RUN/plan.json"
            )
        return _validated(given, given.validate)
    _refuse_words(given)
    if given.guide:
        return _guided(given)
    hardware, seconds, notes = machine_of(given)
    read = find_model(given.model, given.sequence).notes if given.model else ()
    if given.state:
        held = parse_widths(given.state, _without_mesh(given).widths)
        read += (
            f"state: {given.state} makes {held.parameters + held.gradients + held.optimizer} bytes a parameter",
        )
    return (_searched if given.mesh is None else _dry)(given, hardware, seconds, (*read, *notes))


def machine_of(given: Given) -> Machine:
    """Return declared hardware, or with ``--fits`` that of a run, whose collectives then tell a call's time.

    ``--calibrate`` takes what steps of runs reached, and without ``--hardware`` and ``--fits`` the machine of the first
    and the links of all as well.
    """
    base = hardware_of(given.hardware or DEFAULT_HARDWARE)
    seconds: Seconds | None = None
    notes: tuple[str, ...] = ()
    runs = [load_run(path) for path in given.calibrate]
    if given.fits is not None:
        run = load_run(given.fits)
        base, notes = hardware_of_run(run, base)
        seconds = by_curves(curves_of(run))
    elif runs and not given.hardware:
        base, notes = hardware_of_run(runs[0], base)
        curves = [curve for run in runs for curve in curves_of(run, grouped=True)]
        seconds = by_curves(curves, roughly=True) if curves else None
        if not curves:
            base = msgspec.structs.replace(base, links_from="")
        elif not any(curve.op in MESSAGES for curve in curves):
            told = "a hop of a collective stands in for messages: no run has three sizes of p2p.unidirectional"
            notes = (*notes, f"{told}, mode=blocking, dtype=float32")
    if runs:
        base, shares = calibrated(runs, base)
        notes = (*notes, *shares)
    return base, seconds, notes


def spec_of(given: Given) -> StepSpec:
    """Return the step that the options mean; ``UserError`` by equation where a mesh cannot carry it."""
    if given.microbatches and given.global_batch:
        raise UserError("--microbatches and --global-batch say the same thing: give one of them")
    dims = ParallelDims.parse(given.mesh or "")
    spec = replace(place_step(_without_mesh(given), dims), microbatches=given.microbatches or 1)
    if given.global_batch:
        spec = spec.with_batch(given.global_batch)
    elif not given.microbatches and spec.dims.size("pp") > 1:
        spec = replace(spec, microbatches=4 * spec.dims.size("pp"))
    spec = _with_zero(spec, given.zero)
    spec.require(given.gpus or spec.ranks)
    return spec


def _with_zero(spec: StepSpec, stage: int | None) -> StepSpec:
    """Return it with ZeRO's stage; ``fsdp`` shards gradients at least, ``dp`` the optimizer at most."""
    if stage is None:
        return spec
    sharded = spec.dims.size("fsdp") > 1
    if (stage > 1) != sharded:
        rule = (
            "needs fsdp > 1"
            if stage > 1
            else f"is not allowed with fsdp({spec.dims.size('fsdp')}) > 1"
        )
        raise UserError(f"--zero({stage}) {rule}")
    return replace(spec, zero1="distributed" if stage == 1 else "", reshard=stage != 2)


def _without_mesh(given: Given) -> StepSpec:
    if given.model is None:
        raise UserError("--model is missing: --model llama3-70b, or --validate RUN")
    step = replace(
        model_of(given.model, given.sequence),
        microbatch=given.microbatch or 1,
        bytes_per_element=PRECISIONS[given.precision],
        pipeline_options=PipelineOptions(
            schedule=given.schedule or DEFAULT_SCHEDULE,
            stages_per_rank=given.chunks,
            split=given.split,
        ),
        cp_method=given.cp_method or "zigzag",
    )
    step = replace(step, state=parse_widths(given.state, step.widths) if given.state else None)
    return step.with_checkpointing(given.checkpointing or "none")


def _dry(given: Given, hardware: Hardware, seconds: Seconds | None, notes: Sequence[str]) -> Answer:
    run = dry_run(spec_of(given), hardware, seconds=seconds)
    problem = "" if run.fits else lack_of(run)
    if given.as_json and not given.output:
        return Answer(render.as_line(render.dry_run_json(run, notes)), problem)
    explain = given.explain or bool(given.output)
    document = dry_run_document(run, seconds, notes, explain=explain, problem=problem)
    return Answer(
        problem=problem,
        document=with_variants(document, run, seconds) if given.output else document,
    )


def _guided(given: Given) -> Answer:
    from parbench.workloads.planner.guide import GPUS, MODEL, guide

    step = _without_mesh(replace(given, model=given.model or MODEL))
    return Answer(
        document=guide(step, given.gpus or GPUS, hardware_of(given.hardware or DEFAULT_HARDWARE))
    )


def _searched(
    given: Given, hardware: Hardware, seconds: Seconds | None, notes: Sequence[str]
) -> Answer:
    step = _without_mesh(given)
    if not given.gpus:
        raise UserError(
            "--gpus is missing: say how many, such as --gpus 64, or one mesh, such as --mesh dp=8,tp=8"
        )
    if given.microbatches:
        raise UserError("--microbatches needs --mesh: a search takes what makes the --global-batch")
    if given.split:
        raise UserError("--split needs --mesh: a search deals out layers itself")
    if given.top < 1:
        raise UserError(f"--top({given.top}) < 1")
    wanted = Wanted(
        step=step,
        gpus=given.gpus,
        global_batch=given.global_batch or given.gpus,
        microbatch=given.microbatch or 0,
        checkpointing=given.checkpointing,
        schedule=given.schedule,
        cp_method=given.cp_method,
        zero=given.zero,
    )
    found = search(
        wanted, hardware, top=max(given.top, _MOST_POINTS if given.output else 0), seconds=seconds
    )
    require_found(wanted, hardware, found)
    if given.as_json and not given.output:
        return Answer(render.as_line(render.search_json(found, notes)))
    document = search_document(
        found, wanted, given.top, notes, explain=given.explain or bool(given.output)
    )
    return Answer(
        document=with_variants(document, found.best[0], seconds) if given.output else document
    )


def _validated(given: Given, path: Path) -> Answer:
    from parbench.workloads.planner.measured.validate import validate, validation_text

    found = validate(load_run(path), load_run(given.fits) if given.fits else None)
    write_output(path / PLAN_FILE, encode_json(found))
    return Answer(render.as_line(found) if given.as_json else validation_text(found))


def _refuse_words(given: Given) -> None:
    find_schedule(given.schedule or DEFAULT_SCHEDULE)
    for option, word, allowed in (
        ("cp-method", given.cp_method or "zigzag", CONTEXT_METHODS),
        ("precision", given.precision, PRECISIONS),
    ):
        if word not in allowed:
            raise UserError(f"--{option} {word!r} is not {format_choices(allowed, word)}")
    for name, least in (
        ("microbatch", 1),
        ("microbatches", 0),
        ("global_batch", 0),
        ("gpus", 0),
        ("chunks", 0),
    ):
        value = getattr(given, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')}({value}) < {least}")
