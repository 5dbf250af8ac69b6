"""The table of a run's repetitions, with the load of its host."""

from parbench.bench.results.tables import Column, Section, Table, keep_known_columns
from parbench.reports.repetitions import RepetitionSummary, summarize_repetitions
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
        key="steal",
        title="steal",
        kind="percent",
        help="share of CPU time that the hypervisor gave to other machines",
    ),
)


def make_repetition_section(data: RunData) -> Section | None:
    repetitions = summarize_repetitions(data.run)
    if not repetitions:
        return None
    rows = [_make_row(repetition) for repetition in repetitions]
    core_counts = {repetition.load.cores for repetition in repetitions if repetition.load}
    title = "Repetitions"
    if core_counts:
        title += f" on {'/'.join(map(str, sorted(core_counts)))} cores"
    table = Table(
        id="repetitions",
        title=title,
        caption="duration of each repetition, and the load of its host while it measured",
        columns=keep_known_columns(COLUMNS, rows),
        rows=rows,
    )
    return Section(id="repetitions-section", title="Repetitions", tables=[table])


def _make_row(repetition: RepetitionSummary) -> dict[str, float | None]:
    row: dict[str, float | None] = {
        "repetition": repetition.number,
        "seconds": repetition.seconds,
        "measuring": None,
    }
    if repetition.seconds:
        row["measuring"] = repetition.measuring_seconds / repetition.seconds
    load = repetition.load
    if load is not None:
        row["one_minute"] = load.one_minute
        row["other_cores"] = load.other_cores
        row["steal"] = None if load.steal_percent is None else load.steal_percent / 100
    return row
