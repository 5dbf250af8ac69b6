"""The bandwidth of the links between single ranks, as the operation ``p2p.matrix`` measures it."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_case_size
from parbench.reports.operations import group_cases, select_links
from parbench.reports.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LinkMatrix:
    """The links between ranks for messages of one size, mode and type."""

    cases: "pd.DataFrame"
    """The rows of ``select_links``, one for each pair of ranks."""

    @property
    def title(self) -> str:
        """The size, type and mode of the messages."""
        case = self.cases["result"].iloc[0].case
        size = format_case_size(case.params.get("size_bytes"))
        return f"{size} {case.params.get('dtype', '-')}, {case.params.get('mode', '-')}"

    @cached_property
    def bandwidths(self) -> "pd.DataFrame":
        """The bus bandwidth in bytes per second, with a row per sender and a column per receiver.

        It is square. Unknown links are NaN.
        """
        table = self.cases.pivot_table(
            index="param_source", columns="param_target", values="busbw", aggfunc="last"
        )
        ranks = sorted({*table.index, *table.columns})
        return table.reindex(index=ranks, columns=ranks)


def list_link_matrices(data: RunData) -> list[LinkMatrix]:
    """Return a matrix for each size, mode and type in which several links were measured."""
    groups = (group for _, group in group_cases(select_links(data), "source", "target"))
    return [LinkMatrix(group) for group in groups if len(group) > 1]
