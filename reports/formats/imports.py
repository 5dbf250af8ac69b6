"""Other tools' output as a run of ours, so that one report shows it beside our own in one convention (nccl-tests')."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from parbench.bench.files import convert_read_errors, read_file
from parbench.bench.machine.machine import find_package_version
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.bench.plan.plan import Measure, Plan
from parbench.bench.results.records import Record, Samples, WorldInfo, compute_noise
from parbench.bench.results.runs import create_run, open_writer, utc_now, write_run_info
from parbench.bench.text import UserError, format_list
from parbench.reports.formats.foreign import UNKNOWN, ImportedResult, ImportedRun
from parbench.reports.formats.import_nccl import parse_nccl
from parbench.reports.formats.import_osu import parse_osu

PARSERS: dict[str, Callable[[str, str, int | None], ImportedRun]] = {
    "nccl-tests": parse_nccl,
    "osu": parse_osu,
}
_SIGNS = {  # all of which a tool prints
    "nccl-tests": ("redop", "algbw", "busbw"),
    "osu": ("# OSU MPI",),
}


def detect(content: bytes, where: str = "the file") -> str:
    """Return the tool that wrote ``content``, one of ``PARSERS``; raise ``UserError`` if none of them did."""
    text = content.decode(errors="replace")
    if text.lstrip().startswith("{") and '"nccl_version"' in text:
        return "nccl-tests"
    for tool, words in _SIGNS.items():
        if all(word in text for word in words):
            return tool
    raise UserError(
        f"{where} has an unknown format. Formats that can be imported: output of {format_list(PARSERS)}. "
        "Name the tool with --from if the file does not show it"
    )


def import_file(
    path: Path, out: Path, *, nproc: int | None = None, tool: str | None = None
) -> Path:
    """Return a new run's folder with the results of a file; ``UserError`` if it cannot be read or holds none.

    ``nproc`` is for files that do not tell it; ``tool`` spares finding out which tool wrote the file. The run's plan is
    one repetition of what the file holds, its host the one that was measured.
    """
    with convert_read_errors(path, "cannot be imported"):
        content = read_file(path)
        foreign = PARSERS[tool or detect(content, str(path))](
            content.decode(errors="replace"), str(path), nproc
        )
    if not foreign.found:
        reasons = f": left out: {'; '.join(foreign.left_out)}" if foreign.left_out else ""
        raise UserError(f"{path} holds no result of {foreign.tool}{reasons}")
    records, seen = list[Record](), Counter[str]()
    for found in foreign.found:
        target = f"import:{foreign.tool}"
        case = make_case(found.name, target, found.params)
        seen[case.id] += 1
        if (repeat := seen[case.id]) > 1:  # the tool measured it again
            case = make_case(found.name, target, {**found.params, "repeat": repeat})
        records.append(_record(case, found, foreign, path.name))
    with convert_read_errors(path, "cannot be imported"):
        for record in records:
            msgspec.convert(
                msgspec.to_builtins(record), Record
            )  # checks limits before a run is begun
    plan = Plan(
        preset=f"import:{foreign.tool}",
        cases=tuple(record.case for record in records),
        skipped=(),
        nproc=foreign.ranks,
        backend=foreign.backend,
        device=foreign.device,
        repetitions=1,
        budget_seconds=0.0,
        timeout_seconds=0.0,
        measure=Measure(),
        notes=tuple(f"not imported: {sentence}" for sentence in foreign.left_out),
    )
    run, info = create_run(out, plan, find_package_version("parbench") or UNKNOWN)
    environment = {"variables": dict(foreign.variables)} if foreign.variables else None
    host = ", ".join(foreign.hosts) or UNKNOWN
    write_run_info(run, msgspec.structs.replace(info, host=host, environment=environment))
    with open_writer(run) as writer:
        for record in records:
            writer.write(record)
    return run


def _record(case: Case, found: ImportedResult, foreign: ImportedRun, file: str) -> Record:
    tool, wrong = foreign.tool, found.check.passed is False
    count = "" if found.check.wrong is None else f" {found.check.wrong}"
    notes = [
        f"imported from {tool} ({foreign.version or 'version unknown'}); times have no interval"
    ]
    if not foreign.nodes:
        notes.append("the file does not tell the number of nodes: it is written as 0")
    return Record(
        case=case,
        world=WorldInfo(
            size=foreign.ranks,
            nodes=foreign.nodes or 0,
            backend=foreign.backend,
            device=foreign.device,
        ),
        repetition=0,
        status="wrong" if wrong else "ok",
        reason=f"{tool} found{count} wrong results" if wrong else "",
        check=found.check,
        samples=Samples(values=list(found.samples)),
        metrics={} if wrong else dict(found.metrics),  # a wrong result has no time
        noise=compute_noise(Samples(values=list(found.samples))),
        details={
            "size_bytes": case.params["size_bytes"],
            "busbw_factor": get_busbw_factor(case.short_name, found.group_ranks or foreign.ranks),
            **({"group_size": found.group_ranks} if found.group_ranks else {}),
            "convention": "nccl-tests",
            "iterations": found.iterations,
            "printed": dict(found.printed),
            "source": {"tool": tool, "version": foreign.version, "file": file, **foreign.details},
        },
        notes=[*notes, *found.notes],
        started=utc_now(),
        seconds=0.0,
    )
