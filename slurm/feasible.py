"""Whether a point can run, found before anything is submitted: it is planned as ``parbench run`` will plan it."""

from collections.abc import Sequence

from bench.machine.world_spec import WorldSpec
from bench.plan.cases import Definition
from bench.plan.options import Options, make_plan
from bench.plan.plan import Entry, Plan
from bench.text import UserError
from slurm.sweepfile import SweepFile

_WHERE = (("gloo", "cpu"), ("nccl", "cuda"), ("gloo", "cuda"))


def plan_point(
    file: SweepFile, catalogue: Sequence[Definition], *, nodes: int, ntasks_per_node: int, entries: Sequence[Entry]
) -> Plan:
    """Return the plan of a point; ``UserError`` if it asks for what cannot run on so many ranks.

    Where the file names neither backend nor device the nodes decide, so it is enough that one of the two can run it.
    """
    ranks = nodes * ntasks_per_node
    if ranks == 1:
        raise UserError(
            "nodes(1) * ntasks_per_node(1) = 1 rank, which moves nothing; give ntasks_per_node, or leave it out with "
            'exclude = ["ranks == 1"]'
        )
    options = Options(
        preset=file.preset,
        entries=tuple(entries),
        launches=file.launches,
        budget=None if file.budget is None else str(file.budget),
        timeout=None if file.timeout is None else str(file.timeout),
    )
    refusals = []
    for backend, device in possible(file.backend, file.device):
        try:
            return make_plan(options, catalogue, WorldSpec(nproc=ranks, backend=backend, device=device, nodes=nodes))
        except UserError as error:
            refusals.append(error)
    raise refusals[0]


def possible(backend: str | None, device: str | None) -> list[tuple[str, str]]:
    """Return the backends and devices that may be used for what the file says, the likeliest first.

    Without a backend a device has the one that suits it, as in ``parbench run``; gloo on GPUs is used where asked for.
    """
    fitting = [one for one in _WHERE if backend in (None, one[0]) and device in (None, one[1])]
    return fitting if backend else [one for one in fitting if one != ("gloo", "cuda")]
