"""Bandwidth of groups of ranks, by the scope of a group: within a node or between nodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parbench.reports.case_results import CaseResult
from parbench.reports.comparisons import GROUP_PARAMS
from parbench.reports.labels import label_operation
from parbench.reports.operations import SETTING, select_operations
from parbench.reports.run_data import RunData
from parbench.reports.topology import Topology

if TYPE_CHECKING:
    import pandas as pd

WITHIN_NODE = "within a node"
INTER_NODE = "inter-node"
MULTI_NODE = "multi-node"
SCOPES = (WITHIN_NODE, INTER_NODE, MULTI_NODE)
"""All ranks of a group on one node, each rank on another node, or several ranks on some nodes."""
_USUAL_SCOPES = {"node": WITHIN_NODE, "across": INTER_NODE, "world": MULTI_NODE}


@dataclass(frozen=True, kw_only=True)
class GroupScope:
    """The groups that a definition such as ``node`` or ``dp=2,tp=4:tp`` forms, and their scope."""

    group: str
    is_concurrent: bool
    """All groups ran at the same time."""
    scope: str

    @property
    def label(self) -> str:
        """A short name, with the scope if the definition does not imply it."""
        mesh, _, axis = self.group.rpartition(":")
        parts = [f"{axis} of {mesh}" if "=" in mesh else self.group]
        if _USUAL_SCOPES.get(self.group) != self.scope:
            parts.append(self.scope)
        if self.is_concurrent:
            parts.append("concurrent")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class BandwidthByScope:
    """The median bus bandwidth of an operation of one size over the groups of each scope."""

    operation: str
    mode: str
    dtype: str
    size: int
    bandwidths: Mapping[GroupScope, float]
    """In bytes per second."""

    def find_scope(self, *scopes: str, is_concurrent: bool = False) -> GroupScope | None:
        """Return the groups that represent the first of these scopes that was measured.

        The groups ``node`` and ``across`` are preferred to others of the same scope.
        """
        candidates = [
            group
            for group in self.bandwidths
            if group.scope in scopes and group.is_concurrent == is_concurrent
        ]
        return min(
            candidates,
            key=lambda group: (scopes.index(group.scope), group.group not in ("node", "across")),
            default=None,
        )

    def compute_ratio(self, *, is_concurrent: bool = False) -> float | None:
        """Return the bandwidth between nodes relative to that within a node."""
        remote = self.find_scope(INTER_NODE, MULTI_NODE, is_concurrent=is_concurrent)
        local = self.find_scope(WITHIN_NODE, is_concurrent=is_concurrent)
        if remote is None or local is None:
            return None
        return self.bandwidths[remote] / self.bandwidths[local]


def select_groups(data: RunData) -> "pd.DataFrame":
    """Return the operations with a known bus bandwidth and the group that ran each.

    ``operation`` does not include the parameters of groups. ``members`` is a name such as
    ``pairs 0,1``, ``group_scope`` a ``GroupScope``, None if the nodes of the ranks are unknown.
    """
    operations = select_operations(data)
    operations = operations[operations["busbw"] > 0]
    results = operations["result"]
    return operations.assign(
        operation=[label_operation(result.case, GROUP_PARAMS) for result in results],
        members=[_name_members(result) for result in results],
        is_concurrent=[bool(result.case.params.get("concurrent")) for result in results],
        group_scope=[_find_group_scope(result, data.nodes) for result in results],
    )


def _name_members(result: CaseResult) -> str | None:
    """Return the group with its ranks, None for an operation of all ranks."""
    params = result.case.params
    if "group" not in params:
        return None
    ranks = result.details.get("group_ranks") or []
    members = ",".join(map(str, ranks)) or f"number {params.get('group_index', 0)}"
    suffix = " concurrent" if params.get("concurrent") else ""
    return f"{params['group']} {members}{suffix}"


def _find_group_scope(result: CaseResult, topology: Topology | None) -> GroupScope | None:
    if topology is None:
        return None
    params = result.case.params
    if "group_ranks" in result.details:
        ranks = result.details["group_ranks"]
    elif params.get("group_index"):
        return None
    else:
        # A group of all ranks does not list them.
        ranks = range(len(topology.hosts))
    hosts = {topology.get_host(rank) for rank in ranks}
    if "" in hosts:
        return None
    scope = MULTI_NODE
    if len(hosts) == 1:
        scope = WITHIN_NODE
    elif len(hosts) == len(ranks):
        scope = INTER_NODE
    return GroupScope(
        group=str(params.get("group", "world")),
        is_concurrent=bool(params.get("concurrent")),
        scope=scope,
    )


def compute_bandwidth_by_scope(groups: "pd.DataFrame") -> list[BandwidthByScope]:
    """Return each operation and size that groups of at least two scopes ran.

    ``groups`` is the frame of ``select_groups``.
    """
    known = groups[groups["group_scope"].notna()]
    results = []
    for key, cases in known.groupby([*SETTING, "size"], sort=False, dropna=False):
        operation, mode, dtype, size = key
        medians = cases.groupby("group_scope", sort=False)["busbw"].median()
        if len(medians) > 1:
            results.append(
                BandwidthByScope(
                    operation=operation,
                    mode=mode,
                    dtype=dtype,
                    size=size,
                    bandwidths=medians.to_dict(),
                )
            )
    return results
