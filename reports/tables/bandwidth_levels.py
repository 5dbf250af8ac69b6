"""The bandwidths of a machine: of memory, between host and GPU, in pairs, nodes and across nodes."""

from typing import TYPE_CHECKING, Any

from parbench.bench.results.tables import Column, Table, metric_column

if TYPE_CHECKING:
    import pandas as pd

MIN_LEVELS = 3
_COLUMNS = (
    Column(key="level", title="level", help="what moves the data"),
    Column(key="label", title="fastest case", help="the case with the highest bandwidth"),
    metric_column("busbw", key="bandwidth"),
    Column(
        key="of_first", title="of first level", kind="percent", help="relative to the first level"
    ),
    Column(
        key="of_previous",
        title="of level above",
        kind="percent",
        help="relative to the level above",
    ),
)


def make_level_table(operations: "pd.DataFrame") -> Table | None:
    """Return the highest bandwidth of each level, None if a run has fewer than three levels.

    Copies have no bus bandwidth, and their algorithm bandwidth counts each byte once.
    """
    name = operations["name"]
    is_collective = operations["kind"] == "collective"
    is_on_one_node = operations["nodes"] == 1
    levels = {
        "memory copy": name == "memory.copy",
        "host to device": name == "memory.to_device",
        "device to host": name == "memory.from_device",
        "pairs of ranks": (operations["kind"] == "p2p") & is_on_one_node,
        "ranks of a node": is_collective & is_on_one_node,
        "ranks of several nodes": is_collective & (operations["nodes"] > 1),
    }
    bandwidths = operations["busbw"].fillna(operations["algbw"])
    rows: list[dict[str, Any]] = []
    for level, is_in_level in levels.items():
        candidates = bandwidths[is_in_level].dropna()
        if candidates.empty:
            continue
        index: Any = candidates.idxmax()
        bandwidth = float(candidates[index])
        label = operations.loc[index, "label"]
        row: dict[str, Any] = {"level": level, "label": label, "bandwidth": bandwidth}
        if rows:
            row["of_first"] = bandwidth / rows[0]["bandwidth"]
            row["of_previous"] = bandwidth / rows[-1]["bandwidth"]
        rows.append(row)
    if len(rows) < MIN_LEVELS:
        return None
    return Table(
        id="bandwidth-levels",
        title="Bandwidth of memory and links",
        caption="highest bandwidth of each level of the machine",
        columns=_COLUMNS,
        rows=rows,
        where="page",
    )
