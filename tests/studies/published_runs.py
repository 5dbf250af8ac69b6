"""Print published training runs beside what the planner predicts of them, the median and the largest error.

    python tests/studies/published_runs.py [--search]

Nothing is measured and no constant is fitted to a row. ``--search`` adds where a search of as many GPUs at the
same batch ranks the published meshes of the largest models, and what it would take instead.
"""

import argparse
from dataclasses import replace

import support_path  # noqa: F401 - finds the next

from parbench.bench.results.details import Published
from parbench.bench.results.stats import median
from parbench.workloads.planner.candidates import CHECKPOINTINGS, Wanted
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.measured.training_runs import TrainingRun, training_runs
from parbench.workloads.planner.rationale import binding_of, settings_of
from parbench.workloads.planner.report.render import published_rows
from parbench.workloads.planner.search import search

BAR_MEDIAN = 0.15


def error(claim: Published) -> float:
    return abs(claim.predicted / claim.quoted - 1)


def ranked(run: TrainingRun) -> str:
    """Say how a published mesh stands among what a search finds on as many GPUs at its batch."""
    spec = run.spec
    step = replace(spec, mesh={}, split="", schedule="1f1b", chunks=0, checkpointing="none", every=1)
    wanted = Wanted(step=step, gpus=spec.world, global_batch=spec.global_batch)
    found = search(wanted, run.hardware, top=200)
    hows = [dry_run(spec.checkpointed(how), run.hardware, exact=False) for how in CHECKPOINTINGS]
    own = next((each for each in hows if each.fits), hows[0])
    faster = sum(each.seconds < own.seconds for each in found.best)
    best = found.best[0]
    at = f"{faster} of the best {len(found.best)} meshes are faster"
    return (
        f"{run.name} on {spec.world}: {spec.mesh_text} {'fits' if own.fits else own.missing} "
        f"with {settings_of(own.spec)}: {own.seconds:.3g} s, "
        f"bound by {binding_of(own)}; {at}, the first {best.spec.mesh_text} with {settings_of(best.spec)}: "
        f"{best.seconds:.3g} s ({best.seconds / own.seconds - 1:+.1%}), bound by {binding_of(best)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="rank the published meshes among all")
    asked = parser.parse_args()
    runs = list(training_runs())
    claims = [run.published for run in runs]
    print(published_rows(claims))
    worst = max(claims, key=error)
    middle = median([error(one) for one in claims])
    print(f"{len(runs)} runs: median {middle:.1%} (bar {BAR_MEDIAN:.0%}), largest {error(worst):.1%}: {worst.name}")
    for run in runs:
        if not run.predicted.fits:
            print(f"does not fit as assumed: {run.predicted.missing}")
    for run in runs if asked.search else ():
        if run.spec.name.startswith(("llama3-405b", "deepseek")):
            print(ranked(run))


if __name__ == "__main__":
    main()
