"""The table of a run's repetitions, with the load of its host."""

from parbench.bench.results.tables import Column, Section, Table, keep_known_columns
from parbench.reports.analysis.repetitions import list_repetitions
from parbench.reports.run_data import RunData

COLUMNS = (
    Column(
        key="repetition",
        title="repetition",
        kind="count",
        help="number of the repetition, which restarts all ranks",
    ),
    Column(
        key="seconds",
        title="duration",
        kind="s",
        help="time since the end of the previous repetition, or since the start of the run",
    ),
    Column(
        key="measuring",
        title="measuring",
        kind="percent",
        help="share of the duration in which cases were prepared, warmed up, timed and checked",
    ),
    Column(
        key="one_minute",
        title="load average",
        kind="number",
        help="1-minute load average before the repetition",
    ),
    Column(
        key="other_cores",
        title="other load",
        kind="number",
        help="cores that other processes kept busy",
    ),
    Column(
        key="steal_percent",
        title="steal %",
        kind="number",
        help="share of CPU time that the hypervisor gave to other machines",
    ),
    Column(key="cores", title="cores", kind="count", help="cores of the host"),
)


def make_repetition_section(data: RunData) -> Section | None:
    """Return the duration of each repetition, and the load of its host."""
    rows = list_repetitions(data.run)
    if not rows:
        return None
    table = Table(
        id="repetitions",
        title="Repetitions",
        caption="duration of each repetition, and the load of its host while it measured",
        columns=keep_known_columns(COLUMNS, rows),
        rows=rows,
    )
    return Section(id="repetitions-section", title="Repetitions", tables=[table])
