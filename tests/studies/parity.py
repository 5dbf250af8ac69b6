"""Which wrong gradients of single tensors the parity gate sees in real steps, and how near right ones come to it.

    python tests/studies/parity.py [--trials 200]

A gradient of one tensor is missing, halved, doubled or negated, on all ranks or on one, before ranks sum it (after that
where FSDP2 does): in DDP for 11 groups of tensors of three shapes, in other layouts for some. It counts as caught where
a rank names that tensor and no other. Right steps, of one seed each, go through all layouts; none may be called wrong,
and the largest distance over its limit says what the margins leave. Exit code 1: something was missed or miscalled.
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


PIPELINE = {"layers": 4, "microbatch": 1, "microbatches": 4}
MESH = {"kv_heads": 4, "microbatch": 1, "microbatches": 2}
MOE = {"experts": 4, "ffn": 64}
LAYOUTS = (
    Layout("ddp, 4 microbatches", "ddp", {"accumulation": 4}),
    Layout("ddp_bf16", "ddp_bf16", {"accumulation": 2}, tensors=SOME),
    Layout("zero1", "zero1", {"optimizer": "distributed"}, tensors=SOME),
    Layout("fsdp", "fsdp", tensors=SOME, after=True),
    Layout("hsdp", "hsdp", {}, 4),
    Layout("tp", "tp", tensors=SOME),
    Layout("tp_sp", "tp_sp", {"recipe": "llama"}, tensors=SOME),
    Layout("tp_fsdp", "tp_fsdp", {}, 4),
    Layout("cp ring, zigzag", "cp", {"method": "zigzag"}, tensors=SOME),
    Layout("cp ulysses, packed", "cp", {"method": "ulysses", "mask": "packed"}),
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


def of_precisions(case: str) -> dict[str, Params]:
    """Return what a precision's words ask of a case."""
    if case == "ddp_bf16":
        return {REDUCED: {}}
    return {precision: {"precision": precision} for precision in PRECISIONS}


class Spoilt:
    """How many spoilings of each kind were caught."""

    def __init__(self) -> None:
        self.missed: list[str] = []
        self._total = dict.fromkeys(FACTORS, 0)

    def take(self, ranks: Ranks, where: str, case: str, params: Params, tensors: tuple[str, ...], after: bool) -> None:
        for only in (None, ranks.size - 1 if "pp" not in where else 0):
            found = ranks.call("spoilings:unseen", name=case, params=params, tensors=tensors, only=only, after=after)
            missed = set(found[0]).intersection(*found[1:])
            self.missed += [f"{where}, {'all ranks' if only is None else 'one rank'}: {what}" for what in missed]
            for spoiling in FACTORS:
                self._total[spoiling] += len(tensors)

    def row(self) -> str:
        missed = {spoiling: sum(what.endswith(spoiling) for what in self.missed) for spoiling in FACTORS}
        return "  ".join(f"{total - missed[each]:4}/{total:<4}" for each, total in self._total.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="right steps in all")
    trials = parser.parse_args().trials
    missed: list[str] = []
    print(f"{'caught':40}" + "  ".join(f"{spoiling:9}" for spoiling in FACTORS), flush=True)
    clean = [(one, words, more) for one in LAYOUTS for words, more in of_precisions(one.case).items()]
    share, rest = divmod(trials, len(clean))
    called_wrong: list[str] = []
    nearest: list[str] = []
    for size in (2, 4):
        with Ranks(size) as ranks:
            for precision in PRECISIONS if size == 2 else ():
                for shape in SHAPES:
                    spoilt, params = Spoilt(), {"shape": shape, "precision": precision, "microbatch": 2}
                    spoilt.take(ranks, f"ddp {shape}", "ddp", params, tuple(tensors_of(shape).values()), after=False)
                    print(f"{f'ddp, {shape}, {precision}':40}{spoilt.row()}", flush=True)
                    missed += spoilt.missed
            for number, (one, words, more) in enumerate(clean):
                if one.ranks != size:
                    continue
                params = {**SMALL, **one.params, **more}
                if one.tensors:
                    spoilt = Spoilt()
                    spoilt.take(ranks, one.words, one.case, params, one.tensors, one.after)
                    print(f"{f'{one.words}, {words}':40}{spoilt.row()}", flush=True)
                    missed += spoilt.missed
                seeds = range(1, 1 + share + (number < rest))
                by_rank = ranks.call("spoilings:times_limit", name=one.case, params=params, seeds=list(seeds))
                for seed, of_ranks in zip(seeds, zip(*by_rank, strict=True), strict=True):
                    called_wrong += [f"{one.words}, {words}, seed {seed}"] if any(w for w, *_ in of_ranks) else []
                each = [found for of in by_rank for found in of]
                _, most, what, _ = max(each, key=lambda found: found[1])
                label = f"{one.words}, {words}"
                nearest.append(f"{label:40}{most:8.2g}{max(found[3] for found in each):8.2g}  {what}")
    print(f"\n{'largest distance over its limit, of right':40}  tensor     all", *nearest, sep="\n")
    print(f"\nright steps called wrong: {len(called_wrong)}/{trials}", *called_wrong, sep="\n  ")
    print(f"wrong gradients not named: {len(missed)}", *missed, sep="\n  ")
    sys.exit(1 if missed or called_wrong else 0)


if __name__ == "__main__":
    main()
