"""The training steps that can be measured, declared without torch."""

from collections.abc import Mapping

from bench.cases import Definition, Setting
from bench.params import Param, Value

MODEL = (
    Param(name="layers", kind="int", default=4, minimum=1, help="decoder layers"),
    Param(name="hidden", kind="int", default=128, minimum=1, help="hidden size"),
    Param(name="heads", kind="int", default=4, minimum=1, help="attention heads; divides hidden"),
    Param(name="sequence", kind="int", default=64, minimum=1, help="tokens of one sequence"),
    Param(name="vocabulary", kind="int", default=512, minimum=2, help="different tokens"),
    Param(name="microbatch", kind="int", default=4, minimum=1, help="sequences of one rank's step"),
)
BUCKET = Param(name="bucket_mb", kind="float", default=25.0, minimum=0.001, help="gradient bucket, MiB")


def refuse_shape(params: Mapping[str, Value], setting: Setting) -> str | None:
    """Refuse heads that do not divide the hidden size."""
    hidden, heads = int(params["hidden"]), int(params["heads"])
    return f"hidden({hidden}) % heads({heads}) != 0" if hidden % heads else None


DEFINITIONS = (
    Definition(
        name="workload.ddp",
        target="workloads.ddp:prepare",
        help="one DDP training step of a decoder Transformer: forward, backward with bucketed all_reduce, AdamW",
        params=(*MODEL, BUCKET),
        refuse=refuse_shape,
    ),
)
