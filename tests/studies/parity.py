"""Which wrong gradients of single tensors the numerical check sees in real steps.

    python -m tests.studies.parity [--trials 200] [WORD ...]

Words choose the layouts that have one of them. A gradient of one tensor is missing, halved, doubled or negated, on all
ranks or on one, before ranks sum it (after that where FSDP2 does): in DDP for 11 groups of tensors of three shapes, in
other layouts for some. It counts as caught where a rank names that tensor and no other. Right steps of several seeds go
through all layouts, and none may be called wrong. Exit code 1: something was missed or miscalled.
"""

import argparse
import math
import sys
from dataclasses import dataclass, field
from itertools import groupby

from tests.support.ranks import Ranks
from tests.support.spoilings import FACTORS, tensors_of
from tests.support.training_steps import SMALL_PARAMS, Params

SHAPES = ("tiny", "tiny-llama", "small")
SOME = (
    "tokens.weight",
    "layers.1.attention_norm.weight",
    "layers.1.attention.q.weight",
    "layers.1.attention.k.weight",
)
EXPERTS = ("layers.1.ffn.experts.up", "layers.1.ffn.experts.down", "layers.1.ffn.router.weight")


@dataclass(frozen=True)
class Layout:
    """Steps of a small model on so many ranks; some of its gradients are spoilt."""

    words: str
    case: str
    params: Params = field(default_factory=dict)
    ranks: int = 2
    tensors: tuple[str, ...] = ()
    after: bool = False
    model: Params = field(default_factory=lambda: SMALL_PARAMS)
    precisions: tuple[str, ...] = ("float32", "bfloat16")


PIPELINE = {"layers": 4, "microbatch": 1, "microbatches": 4}
MESH = {"kv_heads": 4, "microbatch": 1, "microbatches": 2}
COMPRESSED = {"grad_compression": "bf16"}
MOE = {"experts": 4, "ffn": 64}
LAYOUTS = (
    *(
        Layout(
            f"ddp {shape}",
            "ddp",
            {"shape": shape},
            2,
            tuple(tensors_of(shape).values()),
            model={"microbatch": 2},
        )
        for shape in SHAPES
    ),
    Layout("ddp, 4 microbatches", "ddp", {"accumulation": 4}),
    Layout(
        "ddp, compressed",
        "ddp",
        {**COMPRESSED, "accumulation": 2},
        tensors=SOME,
        precisions=("float32",),
    ),
    Layout("zero1", "zero1", {"optimizer": "distributed"}, tensors=SOME),
    Layout("fsdp", "fsdp", tensors=SOME, after=True),
    Layout("hsdp", "hsdp", {}, 4),
    Layout("tp", "tp", tensors=SOME),
    Layout("tp_sp", "tp_sp", {"recipe": "llama"}, tensors=SOME),
    Layout("tp_fsdp", "tp_fsdp", {}, 4),
    Layout("cp ring, zigzag", "cp", {"method": "zigzag"}, tensors=SOME),
    Layout("cp ulysses, full", "cp", {"method": "ulysses", "mask": "full"}),
    Layout("cp all_gather, llama", "cp", {"method": "allgather_kv", "recipe": "llama"}),
    Layout("pp 1f1b", "pp", {**PIPELINE, "schedule": "1f1b"}, tensors=SOME),
    Layout("pp zero bubble", "pp", {**PIPELINE, "schedule": "zb_h1"}),
    Layout(
        "ep, generator", "ep_step", {"experts": 8, "routing": "zipf", "aux": 0.01}, tensors=EXPERTS
    ),
    Layout("ep, router, fsdp", "ep_step", {"experts": 8, "fsdp": True}),
    Layout("dp tp", "hybrid", {**MESH, "mesh": "dp=2 tp=2"}, 4),
    Layout(
        "pp fsdp",
        "hybrid",
        {**MESH, "layers": 4, "mesh": "pp=2 fsdp=2"},
        4,
        tensors=SOME,
        after=True,
    ),
    Layout("cp dp, llama", "hybrid", {**MESH, "mesh": "cp=2 dp=2", "recipe": "llama"}, 4),
    Layout("dp tp, experts", "hybrid", {**MESH, **MOE, "mesh": "dp=2 tp=2"}, 4, tensors=EXPERTS),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="of the layouts' names")
    parser.add_argument("--trials", type=int, default=200, help="right steps in all")
    options = parser.parse_args()
    layouts = [
        layout
        for layout in LAYOUTS
        if not options.words or set(options.words) & set(layout.words.split())
    ]
    layouts.sort(key=lambda layout: layout.ranks)
    rows = [(layout, precision) for layout in layouts for precision in layout.precisions]
    seeds = range(1, 1 + math.ceil(options.trials / len(rows)))
    print(f"{'caught':40}{''.join(f'{spoiling:10}' for spoiling in FACTORS)}right")
    missed, called_wrong = list[str](), list[str]()
    for size, of_size in groupby(rows, key=lambda row: row[0].ranks):
        with Ranks(size) as ranks:
            for layout, precision in of_size:
                params = {**layout.model, **layout.params, "precision": precision}
                label = f"{layout.words}, {precision}"
                spoilt = {
                    "name": layout.case,
                    "params": params,
                    "tensors": layout.tensors,
                    "after": layout.after,
                }
                unseen = []
                for only in (None, 0) if layout.tensors else ():
                    found = ranks.call("tests.support.spoilings:unseen", only=only, **spoilt)
                    where = "all ranks" if only is None else "one rank"
                    unseen += [
                        f"{label}, {where}: {what}" for what in set.intersection(*map(set, found))
                    ]
                total = 2 * len(layout.tensors)
                caught = [
                    f"{total - sum(what.endswith(each) for what in unseen)}/{total}"
                    for each in FACTORS
                ]
                of_ranks = ranks.call(
                    "tests.support.spoilings:wrong_of_right_steps",
                    name=layout.case,
                    params=params,
                    seeds=seeds,
                )
                right = [not any(wrong) for wrong in zip(*of_ranks, strict=True)]
                called_wrong += [f"{label}, seed {seed}" for seed in seeds if not right[seed - 1]]
                print(
                    f"{label:40}{''.join(f'{text:10}' for text in caught)}{sum(right)}/{len(right)}",
                    flush=True,
                )
                missed += unseen
    print(
        f"\nright steps called wrong: {len(called_wrong)}/{len(seeds) * len(rows)}",
        *called_wrong,
        sep="\n  ",
    )
    total = sum(2 * len(FACTORS) * len(layout.tensors) for layout, _ in rows)
    print(f"wrong gradients not named: {len(missed)}/{total}", *missed, sep="\n  ")
    sys.exit(1 if missed or called_wrong else 0)


if __name__ == "__main__":
    main()
