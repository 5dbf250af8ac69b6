"""ZeRO-1 by torch's ZeroRedundancyOptimizer: DDP's gradients, and each rank keeps the optimizer state of its share."""

from collections.abc import Mapping

from bench.plan.params import Value
from bench.world.torch_compat import sharding_optimizer
from bench.world.world import World
from workloads.costs.former import ddp_sent_bytes
from workloads.data_parallel.ddp import num_elements, wrap
from workloads.model.optimizer import LEARNING_RATE, optimizer_class
from workloads.model.transformer import Transformer
from workloads.step.layout import Layout, data_axis
from workloads.step.training_step import Options, TrainingStep

_NOTE = (
    "zero1: the formula is a reduce_scatter's and an all_gather's, 2 Psi e (n-1)/n; torch's ZeroRedundancyOptimizer "
    "sums all gradients on every rank, as many bytes, and then broadcasts every parameter, Psi e more"
)


def prepare(world: World, **params: Value) -> TrainingStep:
    """Return the step."""
    return TrainingStep(world, params, lay_out)


def lay_out(model: Transformer, world: World, options: Options, params: Mapping[str, Value]) -> Layout:
    """Wrap the model in DDP, and its optimizer in torch's sharding one."""
    ddp = wrap(model, world, float(params["bucket_mb"]))
    optimizer = sharding_optimizer()(
        model.parameters(),
        optimizer_class=optimizer_class(options.dtype, timed=options.timed),
        process_group=world.group,
        lr=LEARNING_RATE,
    )
    return Layout(
        module=ddp,
        model=model,
        optimizer=optimizer,
        axes=data_axis(world),
        data_rank=world.rank,
        data_size=world.size,
        expected_bytes=ddp_sent_bytes(
            num_elements(model), options.dtype.itemsize, world.size, num_synchronisations=options.accumulation
        ),
        state="zero1",
        sharded_by=world.size,
        notes=(_NOTE,),
    )
