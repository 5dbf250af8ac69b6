"""Imports the output of other tools as runs, so that reports and comparisons can read it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.files import convert_read_errors
from parbench.bench.machine.machine import find_package_version
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.bench.plan.plan import Measure, Plan
from parbench.bench.results.metrics import make_value
from parbench.bench.results.records import Record, Status, WorldInfo
from parbench.bench.results.runs import create_run, open_writer, utc_now, write_run_info
from parbench.bench.text import UserError, format_list
from parbench.reports.formats.imported import UNKNOWN, ImportedResult, ImportedRun
from parbench.reports.formats.registry import IMPORT_FORMATS, describe_imports, load_function


def detect_tool(text: str, source: str) -> str:
    """Return the name of the tool that printed a text, a key of ``IMPORT_FORMATS``.

    ``source`` is the name of the file, for the ``UserError`` about an unknown format.
    """
    for tool, entry in IMPORT_FORMATS.items():
        if all(marker in text for marker in entry.markers):
            return tool
    options = format_list(f"--from {tool}" for tool in IMPORT_FORMATS)
    hint = f"If its header is missing, add {options}"
    if text.lstrip().startswith("{"):
        hint = "Import the text output, not JSON"
    raise UserError(f"{source} is not output of {describe_imports()}. {hint}")


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
        nproc: the number of ranks for a file that does not state it, None if not given.
        tool: the name of the tool, None to detect it from the text.
        link_bytes_per_second: the declared speed of the link in B/s, None if it was not declared.
    """
    with convert_read_errors(path, "cannot be imported"):
        text = path.read_bytes().decode(errors="replace")
    tool = tool or detect_tool(text, str(path))
    parse = load_function(IMPORT_FORMATS[tool].parser)
    imported: ImportedRun = parse(text, str(path), nproc)
    if not imported.results:
        raise UserError("; ".join((f"{path} contains no result of {tool}", *imported.notes)))
    source = {"tool": tool, "version": imported.version, "file": path.name}
    records = [
        _make_record(case, result, imported, source)
        for case, result in _make_cases(imported, f"import:{tool}")
    ]
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
        notes=tuple(imported.notes),
    )
    run, info = create_run(out, plan, find_package_version("parbench") or UNKNOWN)
    environment = {"imported": dict(imported.environment)} if imported.environment else None
    host = ", ".join(imported.hosts) or UNKNOWN
    write_run_info(run, msgspec.structs.replace(info, host=host, environment=environment))
    with open_writer(run) as writer:
        for record in records:
            writer.write(record)
    return run


def _make_cases(imported: ImportedRun, target: str) -> Iterator[tuple[Case, ImportedResult]]:
    """Yield (case, result) for each result. A case is a benchmark with its parameters.

    If a file has several results of a case, the later ones get the parameter ``repeat``: 2, 3 and
    so on. ``target`` is the text ``import:TOOL``, which cases store as their origin.
    """
    counts = Counter[str]()
    for result in imported.results:
        case = make_case(result.operation.name, target, result.params)
        counts[case.id] += 1
        if counts[case.id] > 1:
            params = {**result.params, "repeat": counts[case.id]}
            case = make_case(result.operation.name, target, params)
        yield case, result


def _make_record(
    case: Case, result: ImportedResult, imported: ImportedRun, source: dict[str, Any]
) -> Record:
    """Return the record of an imported result, with bandwidths computed from size and time.

    Its status is ``ok``, or ``wrong`` without metrics if the tool's check of correctness failed.

    Args:
        case: the case of the result.
        result: the result, as the tool's file contains it.
        imported: the facts about the job in that file.
        source: the ``tool``, its ``version`` and the ``file``, which the record stores.
    """
    tool = source["tool"]
    version = imported.version or "version unknown"
    notes = [f"imported from {tool} ({version}), without intervals", *result.notes]
    if not imported.hosts:
        notes.append("the file does not state the number of nodes: it is recorded as 0")
    status: Status = "ok"
    reason = ""
    metrics = {}
    if result.check.passed is False:
        status = "wrong"
        num_wrong = "" if result.check.wrong is None else f"{result.check.wrong} "
        reason = f"{tool} reported {num_wrong}wrong results"
    elif result.seconds:
        algbw = int(result.params["size_bytes"]) / result.seconds
        factor = get_busbw_factor(case.short_name, imported.num_ranks)
        metrics = {
            "time": make_value("time", result.seconds, "as printed"),
            "algbw": make_value("algbw", algbw, "size over time"),
            "busbw": make_value(
                "busbw", algbw if factor is None else factor * algbw, "size over time"
            ),
        }
    return Record(
        case=case,
        world=WorldInfo(
            size=imported.num_ranks,
            nodes=len(imported.hosts),
            backend=imported.backend,
            device=imported.device,
        ),
        repetition=0,
        status=status,
        reason=reason,
        check=result.check,
        metrics=metrics,
        details={"source": source},
        notes=notes,
        started=utc_now(),
        seconds=0.0,
    )
