"""Other tools' output as a run of ours, so that one report shows it beside our own in one convention (nccl-tests')."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.machine.machine import package_version
from bench.plan.cases import Case, make_case
from bench.plan.catalogue import busbw_factor
from bench.plan.plan import Measure, Plan
from bench.results.records import Check, Record, Samples, Status, WorldInfo, noise_of
from bench.results.runs import create_run, open_writer, utc_now, write_info
from bench.text import UserError, listed, reading
from reports.formats.foreign import UNKNOWN, Foreign, Found
from reports.formats.import_gloo import parse_gloo
from reports.formats.import_nccl import parse_nccl
from reports.formats.import_osu import parse_osu
from reports.formats.import_param import parse_param

PARSERS: dict[str, Callable[[str, str, int | None], Foreign]] = {
    "nccl-tests": parse_nccl,
    "param": parse_param,
    "osu": parse_osu,
    "gloo": parse_gloo,
}
NO_NODES = 0  # a world's number of nodes where nobody tells it


def detect(content: bytes, where: str = "the file") -> str:
    """Return the tool that wrote ``content``, one of ``PARSERS``; ``UserError`` if it is none of them."""
    text = content.decode(errors="replace")
    if text.lstrip().startswith("{") and '"nccl_version"' in text:
        return "nccl-tests"
    signs = {
        "nccl-tests": ("redop", "algbw", "busbw"),
        "param": ("COMMS-RES",),
        "osu": ("# OSU MPI",),
        "gloo": ("BENCHMARK RESULTS", "elements", "bandwidth (GB/s)"),
    }
    for tool, words in signs.items():
        if all(word in text for word in words):
            return tool
    raise UserError(f"{where} is of no format we know: allowed is what {listed(PARSERS)} print; --from names one")


def import_file(path: Path, out: Path, *, nproc: int | None = None, tool: str | None = None) -> Path:
    """Return a new run's folder with the results of a file; ``UserError`` if it cannot be read or holds none.

    ``nproc`` is for files that do not tell it; ``tool`` spares finding out which tool wrote the file.
    """
    content = _read(path)
    parse = PARSERS[tool or detect(content, str(path))]
    foreign = parse(content.decode(errors="replace"), str(path), nproc)
    if not foreign.found:
        reasons = f": left out: {'; '.join(foreign.left_out)}" if foreign.left_out else ""
        raise UserError(f"{path} holds no result of {foreign.tool}{reasons}")
    world = WorldInfo(
        size=foreign.ranks,
        nodes=NO_NODES if foreign.nodes is None else foreign.nodes,
        backend=foreign.backend,
        device=foreign.device,
    )
    source = {"tool": foreign.tool, "version": foreign.version, "file": path.name, **foreign.details}
    records = tuple(_record(case, found, world, source) for case, found in _cases(foreign))
    return _write(out, foreign, records)


def _read(path: Path) -> bytes:
    with reading(path):
        return path.read_bytes()


def _cases(foreign: Foreign) -> Iterator[tuple[Case, Found]]:
    """Yield each result with its case; what the tool measured again is told apart by ``repeat``."""
    seen: dict[str, int] = {}
    for found in foreign.found:
        target = f"import:{foreign.tool}"
        case = make_case(found.name, target, found.params)
        seen[case.id] = seen.get(case.id, 0) + 1
        if seen[case.id] > 1:
            case = make_case(found.name, target, {**found.params, "repeat": seen[case.id]})
        yield case, found


def _record(case: Case, found: Found, world: WorldInfo, source: dict[str, Any]) -> Record:
    status: Status = "wrong" if found.check.passed is False else "ok"
    return Record(
        case=case,
        world=world,
        launch=0,
        status=status,
        reason=_reason(found.check, source) if status == "wrong" else "",
        check=found.check,
        samples=Samples(values=list(found.samples)),
        metrics={} if status == "wrong" else dict(found.metrics),  # a wrong result has no time
        noise=noise_of(found.samples),
        details={
            "size_bytes": case.params["size_bytes"],
            "busbw_factor": busbw_factor(case.name.partition(".")[2], found.group_ranks or world.size),
            **({"group_size": found.group_ranks} if found.group_ranks else {}),
            "convention": "nccl-tests",
            "iterations": found.iterations,
            "printed": dict(found.printed),
            "source": source,
        },
        notes=[*_notes(world, source), *found.notes],
        started=utc_now(),
        seconds=0.0,
    )


def _reason(check: Check, source: dict[str, Any]) -> str:
    count = "" if check.wrong is None else f" {check.wrong}"
    return f"{source['tool']} found{count} wrong results"


def _notes(world: WorldInfo, source: dict[str, Any]) -> list[str]:
    notes = [f"imported from {source['tool']} ({source['version'] or 'version unknown'}); times have no interval"]
    if world.nodes == NO_NODES:
        notes.append("the file does not tell the number of nodes: it is written as 0")
    return notes


def _write(out: Path, foreign: Foreign, records: Iterable[Record]) -> Path:
    """Write the run's folder: its plan is one launch of what the file holds, its host the one that was measured."""
    written = tuple(records)
    plan = Plan(
        preset=f"import:{foreign.tool}",
        cases=tuple(record.case for record in written),
        skipped=(),
        nproc=foreign.ranks,
        backend=foreign.backend,
        device=foreign.device,
        launches=1,
        budget_seconds=0.0,
        timeout_seconds=0.0,
        measure=Measure(),
        notes=tuple(f"not imported: {sentence}" for sentence in foreign.left_out),
    )
    path, info = create_run(out, plan, package_version("parbench") or UNKNOWN)
    environment = {"variables": dict(foreign.variables)} if foreign.variables else None
    host = ", ".join(foreign.hosts) or UNKNOWN
    write_info(path, msgspec.structs.replace(info, host=host, environment=environment))
    with open_writer(path) as writer:
        for record in written:
            writer.write(record)
    return path
