"""The launches of one run: their time, and what else their host did."""

from collections.abc import Callable

from bench.machine.host_load import HostLoad
from reports import cells
from reports.analysis.analysis import Analysis
from reports.analysis.ranks import Launch, launches_of
from reports.report import Column, Section, Table, known, number


def _of_load(value: Callable[[HostLoad], float | None]) -> Callable[[Launch], float | None]:
    return lambda one: None if one.load is None else value(one.load)


_COLUMNS: tuple[Column[Launch], ...] = (
    number("launch", lambda one: one.number, cells.whole, "ranks started anew"),
    number("took", lambda one: one.seconds, cells.duration, "from the end of the launch before, or the run's start"),
    number(
        "measuring",
        lambda one: one.measuring_seconds / one.seconds,
        cells.percent,
        "share of that in which cases were prepared, warmed up, timed and checked",
    ),
    number("load average", _of_load(lambda load: load.one_minute), cells.significant, "of the minute before"),
    number("others", _of_load(lambda load: load.other_cores), cells.significant, "cores that others kept busy"),
    number(
        "steal",
        _of_load(lambda load: None if load.steal_percent is None else load.steal_percent / 100),
        cells.percent,
        "share of the cores' time that the hypervisor gave to others",
    ),
)


def launch_section(found: Analysis) -> Section | None:
    rows = launches_of(found.run)
    if not rows:
        return None
    on = {one.load.cores for one in rows if one.load}
    where = f" on {'/'.join(map(str, sorted(on)))} cores" if on else ""
    caption = "how long each took, and what else its host did while it measured"
    columns = known(_COLUMNS, rows)
    table = Table(id="launches", title=f"Launches{where}", caption=caption, columns=columns, rows=rows)
    return Section(id="launches-section", title="Launches", tables=(table,))
