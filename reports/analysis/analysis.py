"""All that a run's rows say together, found once for all renderers. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from bench.results.runs import Run
from reports.analysis.attention import Comparison, Context, compared, contexts
from reports.analysis.experts import Mixture, mixtures
from reports.analysis.fits import Ceiling, Curve, ceiling_of, fit_curves
from reports.analysis.group_kinds import Grouped, Kinds, grouped, kinds
from reports.analysis.interference import Pairs, pairs
from reports.analysis.pipelines import Pipeline, pipelines, read_pipeline, without_timelines
from reports.analysis.rank_hosts import Nodes, nodes_of
from reports.analysis.summary import Row, Summary, unreadable
from reports.analysis.timelines import Late, Traced, late_rows, traced_steps


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A run's rows by what they are, with what is computed from several of them; ``summary`` holds no timelines."""

    run: Run
    summary: Summary
    communication: tuple[Row, ...]
    steps: tuple[Row, ...]
    matrices: tuple[Pairs, ...]
    ceiling: Ceiling | None
    curves: tuple[Curve, ...]
    pipelines: tuple[Pipeline, ...]
    unreadable: tuple[str, ...]

    @property
    def shown(self) -> tuple[Row, ...]:
        """The rows with a valid measurement."""
        return tuple(row for row in self.summary.rows if row.metrics)

    @cached_property
    def nodes(self) -> Nodes | None:
        """Where the ranks ran; None where all are on one host, or the run does not tell."""
        return nodes_of(self.run)

    @cached_property
    def kinds(self) -> tuple[Kinds, ...]:
        """The operations within and across nodes, beside each other."""
        return kinds(self.communication, self.nodes)

    @cached_property
    def groups(self) -> tuple[Grouped, ...]:
        """The operations that several groups ran, or one both alone and beside all others."""
        return grouped(self.communication)

    @cached_property
    def contexts(self) -> tuple[Context, ...]:
        """The context-parallel steps."""
        return contexts(self.steps)

    @cached_property
    def context_comparisons(self) -> tuple[Comparison, ...]:
        """Their methods side by side."""
        return compared(self.contexts, self.run.info.plan.notes)

    @cached_property
    def mixtures(self) -> tuple[Mixture, ...]:
        """The expert-parallel steps."""
        return mixtures(self.steps)

    @cached_property
    def timelines(self) -> tuple[Traced, ...]:
        """The steps with a traced timeline, read from the run's folder when they are first asked for."""
        return traced_steps(self.run, self.steps)

    @cached_property
    def late(self) -> tuple[Late, ...]:
        """Who comes late to what, read from the raw samples when it is first asked for."""
        return late_rows(self.run, self.shown)


def analyse(run: Run, summary: Summary) -> Analysis:
    """Return what there is to show of a run that has been summarised."""
    with_timelines = [row for row in summary.rows if row.metrics]
    summary = without_timelines(summary)
    shown = [row for row in summary.rows if row.metrics]
    matrices = pairs(shown)
    in_matrices = {row.case.id for matrix in matrices for row in matrix.rows.values()}
    communication = _only(shown, lambda row: row.is_communication and row.case.id not in in_matrices)
    ceiling = ceiling_of(run, communication)
    return Analysis(
        run=run,
        summary=summary,
        communication=communication,
        steps=_only(shown, lambda row: not row.is_communication),
        matrices=matrices,
        ceiling=ceiling,
        curves=fit_curves(communication, ceiling),
        pipelines=pipelines(with_timelines),
        unreadable=unreadable(with_timelines, read_pipeline),
    )


def _only(rows: Iterable[Row], wanted: Callable[[Row], bool]) -> tuple[Row, ...]:
    return tuple(row for row in rows if wanted(row))
