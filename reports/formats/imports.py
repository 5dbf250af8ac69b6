"""Imports the output of other tools as runs, so that reports and comparisons can read it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.files import convert_read_errors, read_file
from parbench.bench.machine.machine import find_package_version
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.bench.plan.plan import Measure, Plan
from parbench.bench.results.records import Record, Samples, WorldInfo, compute_noise
from parbench.bench.results.runs import create_run, open_writer, utc_now, write_run_info
from parbench.bench.text import UserError, format_list
from parbench.reports.formats.imported import UNKNOWN, ImportedResult, ImportedRun
from parbench.reports.formats.registry import IMPORT_FORMATS, load_function


def detect_tool(text: str, source: str) -> str:
    """Return the name of the tool that printed a text, a key of ``IMPORT_FORMATS``.

    ``source`` is the name of the file, for the ``UserError`` about an unknown format.
    """
    for tool, entry in IMPORT_FORMATS.items():
        if any(all(marker in text for marker in markers) for markers in entry.markers):
            return tool
    raise UserError(
        f"{source} has an unknown format. Formats that can be imported: output of "
        f"{format_list(IMPORT_FORMATS)}, not of gloo's benchmark or PARAM. "
        "Name the tool with --from if the file does not show it"
    )


def import_file(
    path: Path,
    out: Path,
    *,
    nproc: int | None = None,
    tool: str | None = None,
    link_bytes_per_second: float | None = None,
) -> Path:
    """Write the results in a file of another tool as a new run, and return the run's folder.

    The run has one repetition. Raises ``UserError`` for a file without results.

    Args:
        path: the file.
        out: the folder in which the folder of the run is created.
        nproc: the number of ranks, for files that do not state it.
        tool: the name of the tool, None to detect it from the text.
        link_bytes_per_second: the declared speed of the link in B/s, None if it was not declared.
    """
    with convert_read_errors(path, "cannot be imported"):
        text = read_file(path).decode(errors="replace")
        tool = tool or detect_tool(text, str(path))
        parse = load_function(IMPORT_FORMATS[tool].parser)
        imported: ImportedRun = parse(text, str(path), nproc)
        if not imported.results:
            reason = "; ".join(imported.omissions)
            hint = f": not imported: {reason}" if reason else ""
            raise UserError(f"{path} contains no result of {tool}{hint}")
        source = {"tool": tool, "version": imported.version, "file": path.name}
        records = [
            _make_record(case, result, imported, source)
            for case, result in _make_cases(imported.results, tool)
        ]
        for record in records:  # Checks the limits before a run is created.
            msgspec.convert(msgspec.to_builtins(record), Record)
    plan = Plan(
        preset=f"import:{tool}",
        cases=tuple(record.case for record in records),
        skipped=(),
        nproc=imported.num_ranks,
        backend=imported.backend,
        device=imported.device,
        repetitions=1,
        budget_seconds=0.0,
        timeout_seconds=0.0,
        measure=Measure(),
        link_bytes_per_second=link_bytes_per_second,
        notes=(
            *imported.notes,
            *(f"not imported: {omission}" for omission in imported.omissions),
        ),
    )
    run, info = create_run(out, plan, find_package_version("parbench") or UNKNOWN)
    environment: dict[str, Any] = {}
    if imported.variables:
        environment["variables"] = dict(imported.variables)
    if imported.environment:
        environment["imported"] = dict(imported.environment)
    host = ", ".join(imported.hosts) or UNKNOWN
    write_run_info(run, msgspec.structs.replace(info, host=host, environment=environment or None))
    with open_writer(run) as writer:
        for record in records:
            writer.write(record)
    return run


def _make_cases(
    results: Sequence[ImportedResult], tool: str
) -> Iterator[tuple[Case, ImportedResult]]:
    """Yield (case, result) for each result. A case is a benchmark with its parameters.

    If a file has several results of a case, the later ones get the parameter ``repeat``: 2, 3 and
    so on. ``tool`` is the name of the tool.
    """
    counts = Counter[str]()
    for result in results:
        case = make_case(result.name, f"import:{tool}", result.params)
        counts[case.id] += 1
        if counts[case.id] > 1:
            params = {**result.params, "repeat": counts[case.id]}
            case = make_case(result.name, f"import:{tool}", params)
        yield case, result


def _make_record(
    case: Case, result: ImportedResult, imported: ImportedRun, source: dict[str, Any]
) -> Record:
    """Return the record of an imported result. Its status is ``wrong`` if the tool's check failed.

    Otherwise the status is ``ok``.

    Args:
        case: the case of the result.
        result: the result, as the tool's file contains it.
        imported: the facts about the job in that file.
        source: the ``tool``, its ``version`` and the ``file``, which the record stores.
    """
    tool = source["tool"]
    version = imported.version or "version unknown"
    notes = [f"imported from {tool} ({version}); times have no interval"]
    if not imported.nodes:
        notes.append("the file does not state the number of nodes: it is recorded as 0")
    is_wrong = result.check.passed is False
    num_wrong = "" if result.check.wrong is None else f" {result.check.wrong}"
    samples = Samples(values=list(result.samples))
    group_size = result.group_size or imported.num_ranks
    details = {
        "size_bytes": case.params["size_bytes"],
        "busbw_factor": get_busbw_factor(case.short_name, group_size),
        "convention": "nccl-tests",
        "iterations": result.iterations,
        "printed": dict(result.printed),
        "source": source,
    }
    if result.group_size:
        details["group_size"] = result.group_size
    return Record(
        case=case,
        world=WorldInfo(
            size=imported.num_ranks,
            nodes=imported.nodes or 0,
            backend=imported.backend,
            device=imported.device,
        ),
        repetition=0,
        status="wrong" if is_wrong else "ok",
        reason=f"{tool} reported{num_wrong} wrong results" if is_wrong else "",
        check=result.check,
        samples=samples,
        metrics={} if is_wrong else dict(result.metrics),  # A wrong result has no time.
        noise=compute_noise(samples),
        details=details,
        notes=[*notes, *result.notes],
        started=utc_now(),
        seconds=0.0,
    )
