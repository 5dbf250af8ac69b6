"""All that a run's rows say together, found once for all renderers. Pure."""

from dataclasses import dataclass
from functools import cached_property

from bench.results.runs import Run
from reports.analysis.attention import Comparison, Context, compared, contexts
from reports.analysis.contrasts import Grouped, Kinds, Pairs, grouped, kinds, pairs
from reports.analysis.experts import Mixture, mixtures
from reports.analysis.fits import Ceiling, Curve, ceiling_of, fit_curves
from reports.analysis.pipelines import Pipeline, pipelines, read_pipeline, without_timelines
from reports.analysis.rank_hosts import Nodes, nodes_of
from reports.analysis.summary import Row, Summary, unreadable
from reports.analysis.timelines import Late, Traced, late_rows, traced_steps


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A run's rows by what they are, with what is computed from several of them; ``summary`` holds no timelines.

    ``kinds`` are operations within and across nodes, ``groups`` those that several groups ran; ``timelines`` and
    ``late`` are read from the run's folder when they are first asked for.
    """

    run: Run
    summary: Summary
    shown: tuple[Row, ...]
    communication: tuple[Row, ...]
    steps: tuple[Row, ...]
    matrices: tuple[Pairs, ...]
    ceiling: Ceiling | None
    curves: tuple[Curve, ...]
    nodes: Nodes | None
    kinds: tuple[Kinds, ...]
    groups: tuple[Grouped, ...]
    pipelines: tuple[Pipeline, ...]
    contexts: tuple[Context, ...]
    context_comparisons: tuple[Comparison, ...]
    mixtures: tuple[Mixture, ...]
    unreadable: tuple[str, ...]

    @cached_property
    def timelines(self) -> tuple[Traced, ...]:
        return traced_steps(self.run, self.steps)

    @cached_property
    def late(self) -> tuple[Late, ...]:
        return late_rows(self.run, self.shown)


def analyse(run: Run, summary: Summary) -> Analysis:
    with_timelines = [row for row in summary.rows if row.metrics]
    summary = without_timelines(summary)
    shown = tuple(row for row in summary.rows if row.metrics)
    steps, matrices, nodes = tuple(row for row in shown if not row.is_communication), pairs(shown), nodes_of(run)
    in_matrices = {row.case.id for matrix in matrices for row in matrix.rows.values()}
    communication = tuple(row for row in shown if row.is_communication and row.case.id not in in_matrices)
    ceiling, found = ceiling_of(run, communication), contexts(steps)
    return Analysis(
        run=run,
        summary=summary,
        shown=shown,
        communication=communication,
        steps=steps,
        matrices=matrices,
        ceiling=ceiling,
        curves=fit_curves(communication, ceiling),
        nodes=nodes,
        kinds=kinds(communication, nodes),
        groups=grouped(communication),
        pipelines=pipelines(with_timelines),
        contexts=found,
        context_comparisons=compared(found, run.info.plan.notes),
        mixtures=mixtures(steps),
        unreadable=unreadable(with_timelines, read_pipeline),
    )
