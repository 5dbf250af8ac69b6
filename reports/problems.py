"""What did not go as planned, in words: wrong, hung, failed, skipped, and never measured."""

from dataclasses import dataclass

from reports.summary import Missing, Row, Summary


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A case (or several missing ones), what became of it and why; ``row`` holds the evidence if there is any."""

    case: str
    status: str
    launches: str
    reason: str
    row: Row | None = None


def bad_rows(summary: Summary) -> tuple[Problem, ...]:
    """Return the rows that are not ok, with how many launches ended so."""
    return tuple(_bad(row) for row in summary.rows if row.status not in ("ok", "skipped"))


def not_measured(summary: Summary) -> tuple[Problem, ...]:
    """Return what was left out: skipped by the plan or by a launch, or without a record."""
    planned = [
        Problem(case=one.case.label, status="skipped", launches="all", reason=one.reason) for one in summary.skipped
    ]
    skipped = [_bad(row) for row in summary.rows if row.status == "skipped"]
    return (*planned, *skipped, *_missing_by_name(summary))


def _bad(row: Row) -> Problem:
    launches = sum(record.status == row.status for record in row.records)
    return Problem(
        case=row.case.label,
        status=row.status,
        launches=f"{launches}/{row.planned}",
        reason="; ".join(row.reasons) or "no reason was recorded",
        row=row,
    )


def _missing_by_name(summary: Summary) -> list[Problem]:
    """Return one line for a name: after an interruption nearly every case would have its own."""
    groups: dict[str, list[Missing]] = {}
    for one in summary.missing:
        groups.setdefault(one.case.name, []).append(one)
    return [
        Problem(
            case=group[0].case.label if len(group) == 1 else f"{name} ({len(group)} cases)",
            status="not measured",
            launches=f"{sum(one.launches for one in group)}/{sum(one.planned for one in group)}",
            reason="no record: the run ended before",
        )
        for name, group in groups.items()
    ]
