"""The table of a run's repetitions, with the load of its host."""

from parbench.bench.results.tables import Column, Section, Table, keep_known_columns
from parbench.reports.analysis.repetitions import list_repetitions
from parbench.reports.run_data import RunData

COLUMNS = (
    Column(
        "repetition",
        kind="count",
        help="number of the repetition, which restarts all ranks",
    ),
    Column(
        "seconds",
        "duration",
        kind="s",
        help="time since the end of the previous repetition, or since the start of the run",
    ),
    Column(
        "measuring",
        kind="percent",
        help="share of the duration in which cases were prepared, warmed up, timed and checked",
    ),
    Column(
        "one_minute",
        "load average",
        kind="number",
        help="1-minute load average before the repetition",
    ),
    Column(
        "other_cores",
        "other load",
        kind="number",
        help="cores that other processes kept busy",
    ),
    Column(
        "steal_percent",
        "steal %",
        kind="number",
        help="share of CPU time that the hypervisor gave to other machines",
    ),
    Column("cores", kind="count", help="cores of the host"),
)


def make_repetition_section(data: RunData) -> Section | None:
    """Return the duration of each repetition, and the load of its host."""
    rows = list_repetitions(data.run)
    if not rows:
        return None
    table = Table(
        "repetitions",
        "Repetitions",
        caption="duration of each repetition, and the load of its host while it measured",
        columns=keep_known_columns(COLUMNS, rows),
        rows=rows,
    )
    return Section("repetitions-section", "Repetitions", tables=[table])
