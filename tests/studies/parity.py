"""Which wrong gradients of single tensors the parity gate sees in real steps, and how near right ones come to it.

    python tests/studies/parity.py [--trials 200] [WORD ...]

Words choose the layouts that have one of them. A gradient of one tensor is missing, halved, doubled or negated, on all
ranks or on one, before ranks sum it (after that where FSDP2 does): in DDP for 11 groups of tensors of three shapes, in
other layouts for some. It counts as caught where a rank names that tensor and no other. Right steps, of one seed each,
go through all layouts; none may be called wrong, and the largest distance over its limit, of a tensor and of all
together, says what the margins leave. Exit code 1: something was missed or miscalled.
"""

import argparse
import sys
from dataclasses import dataclass, field

import support_path  # noqa: F401 - the next imports are of the tests' helpers
from ranks import Ranks
from spoilings import FACTORS, tensors_of
from training_steps import SMALL, Params

SHAPES = ("tiny", "tiny-llama", "small")
PRECISIONS = ("float32", "bfloat16")
REDUCED = "float32, reduced in bfloat16"
SOME = ("tokens.weight", "layers.1.attention_norm.weight", "layers.1.attention.q.weight", "layers.1.attention.k.weight")
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
    model: Params = field(default_factory=lambda: SMALL)

    @property
    def precisions(self) -> dict[str, Params]:
        """What a precision's words ask of a case."""
        if self.case == "ddp_bf16":
            return {REDUCED: {}}
        return {precision: {"precision": precision} for precision in PRECISIONS}


PIPELINE = {"layers": 4, "microbatch": 1, "microbatches": 4}
MESH = {"kv_heads": 4, "microbatch": 1, "microbatches": 2}
MOE = {"experts": 4, "ffn": 64}
LAYOUTS = (
    *(
        Layout(f"ddp {shape}", "ddp", {"shape": shape}, 2, tuple(tensors_of(shape).values()), model={"microbatch": 2})
        for shape in SHAPES
    ),
    Layout("ddp, 4 microbatches", "ddp", {"accumulation": 4}),
    Layout("ddp_bf16", "ddp_bf16", {"accumulation": 2}, tensors=SOME),
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
    Layout("ep, generator", "ep_step", {"experts": 8, "routing": "zipf", "aux": 0.01}, tensors=EXPERTS),
    Layout("ep, router, fsdp", "ep_step", {"experts": 8, "fsdp": True}),
    Layout("dp tp", "hybrid", {**MESH, "mesh": "dp=2 tp=2"}, 4),
    Layout("pp fsdp", "hybrid", {**MESH, "layers": 4, "mesh": "pp=2 fsdp=2"}, 4, tensors=SOME, after=True),
    Layout("cp dp, llama", "hybrid", {**MESH, "mesh": "cp=2 dp=2", "recipe": "llama"}, 4),
    Layout("dp tp, experts", "hybrid", {**MESH, **MOE, "mesh": "dp=2 tp=2"}, 4, tensors=EXPERTS),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the layouts' names")
    parser.add_argument("--trials", type=int, default=200, help="right steps in all")
    options = parser.parse_args()
    chosen = [one for one in LAYOUTS if not options.words or set(options.words) & set(one.words.split())]
    rows = [(one, precision, more) for one in chosen for precision, more in one.precisions.items()]
    share, rest = divmod(options.trials, len(rows))
    print(f"{'caught':40}{''.join(f'{each:10}' for each in FACTORS)}right  tensor  all   nearest")
    missed, called_wrong, number = list[str](), list[str](), 0
    for size in sorted({one.ranks for one in chosen}):
        with Ranks(size) as ranks:
            for one, precision, more in (row for row in rows if row[0].ranks == size):
                params, label = {**one.model, **one.params, **more}, f"{one.words}, {precision}"
                spoilt = {"name": one.case, "params": params, "tensors": one.tensors, "after": one.after}
                unseen = []
                for only in (None, 0):
                    found = ranks.call("spoilings:unseen", only=only, **spoilt) if one.tensors else [[]]
                    where = "all ranks" if only is None else "one rank"
                    unseen += [f"{label}, {where}: {what}" for what in set.intersection(*map(set, found))]
                total = 2 * len(one.tensors)
                caught = [total - sum(what.endswith(each) for what in unseen) for each in FACTORS]
                seeds = [1 + seed for seed in range(share + (number < rest))]
                of_ranks = ranks.call("spoilings:times_limit", name=one.case, params=params, seeds=seeds)
                steps = [step for of_rank in of_ranks for step in of_rank]
                for seed, *of_seed in zip(seeds, *of_ranks, strict=True):
                    called_wrong += [f"{label}, seed {seed}"] if any(wrong for wrong, *_ in of_seed) else []
                _, nearest, name, _ = max(steps, key=lambda step: step[1], default=(0, 0.0, "", 0.0))
                together = max((step[3] for step in steps), default=0.0)
                told = "".join(f"{f'{each}/{total}' if total else '-':10}" for each in caught)
                print(f"{label:40}{told}{len(seeds):5}{nearest:8.2g}{together:6.2f}  {name}", flush=True)
                missed, number = missed + unseen, number + 1
    print(f"\nright steps called wrong: {len(called_wrong)}/{options.trials}", *called_wrong, sep="\n  ")
    total = sum(2 * len(FACTORS) * len(one.tensors) for one, *_ in rows)
    print(f"wrong gradients not named: {len(missed)}/{total}", *missed, sep="\n  ")
    sys.exit(1 if missed or called_wrong else 0)


if __name__ == "__main__":
    main()
