"""What ``parbench plan`` was asked, answered: text or one line of JSON, and the exit code."""

from dataclasses import dataclass, replace
from pathlib import Path

from bench.results.runs import load_run
from bench.text import UserError, did_you_mean, listed
from workloads.mesh.constraints import CP_METHODS
from workloads.pipeline_parallel.schedules import default_chunks
from workloads.planner import plan_json, plan_text
from workloads.planner.ask import CHECKPOINTING, PRECISIONS, Ask, Checkpointing, parse_mesh, require
from workloads.planner.dry_run import dry_run
from workloads.planner.hardware import Hardware, hardware_of
from workloads.planner.infeasible import lack_of, require_found
from workloads.planner.link_time import Seconds
from workloads.planner.models import model_of
from workloads.planner.published import claims
from workloads.planner.run_fits import by_curves, curves_of, hardware_of_run
from workloads.planner.search import Wanted, search

_DEFAULT_HARDWARE = "h100"
_SEQUENCES_A_GPU = 1


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
    schedule: str = "1f1b"
    chunks: int = 0
    checkpointing: str | None = None
    cp_method: str = "zigzag"
    hardware: str | None = None
    fits: Path | None = None
    search: bool = False
    top: int = 10
    explain: bool = False
    validate: Path | None = None
    published: bool = False
    as_json: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware, a call's time where a run tells it, and what a reader must know of both."""

    hardware: Hardware
    seconds: Seconds | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What goes to stdout, and the sentence that ends the command with code 2, if any."""

    text: str
    problem: str = ""


def answer(given: Given) -> Answer:
    """Return the answer; ``UserError`` where the question has none."""
    if given.published:
        found = claims()
        return Answer(
            text=plan_json.as_line(plan_json.claims_json(found)) if given.as_json else plan_text.claims_text(found)
        )
    if given.validate is not None:
        return _validation(given, given.validate)
    _refuse_words(given)
    machine = machine_of(given)
    return _searched(given, machine) if given.search else _dry(given, machine)


def machine_of(given: Given) -> Machine:
    """Return declared hardware, or with ``--fits`` that of a run, whose collectives then tell a call's time."""
    base = hardware_of(given.hardware or _DEFAULT_HARDWARE)
    if given.fits is None:
        return Machine(hardware=base)
    run = load_run(given.fits)
    hardware, notes = hardware_of_run(run, base)
    return Machine(hardware=hardware, seconds=by_curves(curves_of(run)), notes=notes)


def ask_of(given: Given) -> Ask:
    """Return the step that the options mean; ``UserError`` by equation where a mesh cannot carry it."""
    if given.mesh is None:
        raise UserError("--mesh is missing: write one such as dp=8,pp=4,tp=8, or ask for --search")
    if given.microbatches and given.global_batch:
        raise UserError("--microbatches and --global-batch say the same thing: give one of them")
    mesh = parse_mesh(given.mesh)
    ask = Ask(
        model=model_of(_model(given), given.sequence),
        mesh=mesh,
        microbatch=given.microbatch or 1,
        microbatches=given.microbatches or 1,
        element_bytes=_element_bytes(given),
        checkpointing=_checkpointing(given) or "none",
        schedule=given.schedule,
        chunks=given.chunks,
        cp_method=given.cp_method,
    )
    if given.global_batch:
        ask = ask.with_batch(given.global_batch)
    elif not given.microbatches and ask.pp > 1:
        ask = ask.with_batch(ask.dp * ask.fsdp * ask.microbatch * 4 * ask.pp)
    require(ask, given.gpus or ask.world)
    return ask


def _dry(given: Given, machine: Machine) -> Answer:
    run = dry_run(ask_of(given), machine.hardware, seconds=machine.seconds)
    problem = "" if run.fits else lack_of(run, _wanted(given, run.ask.world, run.ask.global_batch))
    if given.as_json:
        return Answer(text=plan_json.as_line(plan_json.dry_run_json(run, machine.notes)), problem=problem)
    text = plan_text.dry_run_text(run, machine.notes)
    if given.explain:
        text += f"\n\n{plan_text.formulas_text(run)}"
    return Answer(text=text, problem=problem)


def _searched(given: Given, machine: Machine) -> Answer:
    if given.mesh is not None:
        raise UserError("--mesh and --search do not go together: a search finds the mesh")
    if not given.gpus:
        raise UserError("--gpus is missing: --search needs to know how many")
    if given.microbatches:
        raise UserError("--microbatches and --search do not go together: a search takes what makes the --global-batch")
    if given.top < 1:
        raise UserError(f"--top({given.top}) < 1")
    wanted = replace(
        _wanted(given, given.gpus, given.global_batch or given.gpus * _SEQUENCES_A_GPU),
        microbatch=given.microbatch or 0,
        checkpointing=_checkpointing(given),
    )
    found = search(wanted, machine.hardware, top=given.top, seconds=machine.seconds)
    require_found(wanted, machine.hardware, found)
    if given.as_json:
        return Answer(text=plan_json.as_line(plan_json.search_json(found, machine.notes)))
    words = (
        f"{wanted.model.name} on {wanted.gpus} GPUs ({machine.hardware.name}) at global batch {wanted.global_batch} "
        f"of {wanted.model.shape.sequence} tokens"
    )
    text = plan_text.search_text(found, words, machine.notes)
    if given.explain:
        text += f"\n\n{plan_text.formulas_text(found.best[0])}"
    return Answer(text=text)


def _wanted(given: Given, gpus: int, global_batch: int) -> Wanted:
    return Wanted(
        model=model_of(_model(given), given.sequence),
        gpus=gpus,
        global_batch=global_batch,
        element_bytes=_element_bytes(given),
        schedule=given.schedule,
        chunks=given.chunks,
        cp_method=given.cp_method,
    )


def _validation(given: Given, path: Path) -> Answer:
    from workloads.planner.validate import validate, validation_text, write_validation

    found = validate(load_run(path), load_run(given.fits) if given.fits else None)
    write_validation(path, found)
    return Answer(text=plan_json.as_line(found) if given.as_json else validation_text(found))


def _refuse_words(given: Given) -> None:
    """Refuse what no mesh could make right."""
    default_chunks(given.schedule)  # names the schedules
    if given.cp_method not in CP_METHODS:
        raise UserError(
            f"--cp-method {given.cp_method!r} is not {listed(CP_METHODS)}{did_you_mean(given.cp_method, CP_METHODS)}"
        )
    for name, least in (("microbatch", 1), ("microbatches", 0), ("global_batch", 0), ("gpus", 0), ("chunks", 0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')}({value}) < {least}")


def _model(given: Given) -> str:
    if given.model is None:
        raise UserError("--model is missing: --model llama3-70b, or --published, or --validate RUN")
    return given.model


def _element_bytes(given: Given) -> int:
    if given.precision not in PRECISIONS:
        raise UserError(
            f"--precision {given.precision!r} is not {listed(PRECISIONS)}{did_you_mean(given.precision, PRECISIONS)}"
        )
    return PRECISIONS[given.precision]


def _checkpointing(given: Given) -> Checkpointing | None:
    if given.checkpointing is not None and given.checkpointing not in CHECKPOINTING:
        raise UserError(
            f"--checkpointing {given.checkpointing!r} is not {listed(CHECKPOINTING)}"
            f"{did_you_mean(given.checkpointing, CHECKPOINTING)}"
        )
    return given.checkpointing
