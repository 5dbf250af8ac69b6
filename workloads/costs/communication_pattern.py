"""Every call that a rank makes in a step: what, how large, how often, on which ranks. Pure.

Sizes are nccl-tests': an all_gather's output, a reduce_scatter's input, what one rank of an all_to_all holds. Letters
are those of ``Position.symbols``. Expected bytes, ``plan``, its ``--validate``, ``--explain`` and the search read this.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from parbench.bench.plan.catalogue import ONE
from parbench.bench.plan.catalogue import OPERATIONS as CATALOGUE
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import (
    Kind,
    elements_of,
    layer_elements,
    padded_elements,
    tables_of,
)
from parbench.workloads.costs.step_spec import Position
from parbench.workloads.expert_parallel.dispatchers import COUNT_BYTES, INDEX_BYTES

_FACTORS: Mapping[str, Callable[[int], float]] = {
    **{spec.short_name: spec.busbw.compute for spec in CATALOGUE if spec.busbw},
    "send": ONE.compute,
    "recv": lambda n: 0.0,  # the sender counts it
    "barrier": lambda n: 0.0,
}
_SHARED = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), "(n - 1) / n")
_FACTOR_TEXTS = {"all_reduce": "2 (n - 1) / n", **_SHARED}
SOURCES = {
    "tp": "arXiv 1909.08053, 2205.05198",
    "cp": "arXiv 2310.01889 (ring), 2309.14509 (Ulysses)",
    "ep": "arXiv 2006.16668",
    "etp": "this suite's own",
    "pp": "arXiv 2104.04473",
    "fsdp": "arXiv 1910.02054",
    "dp": "arXiv 2006.15704",
    "edp": "arXiv 2006.15704",
}


def sent_bytes(operation: str, num_bytes: float, n: int) -> float:
    """Return the bytes that the busiest rank's link carries in one ring-optimal call on ``n`` ranks.

    ``num_bytes`` is the whole: an all_gather's output, a reduce_scatter's input, what one rank of an all_to_all holds.
    The factors are nccl-tests' (doc/PERFORMANCE.md). For broadcast and reduce that is all of ``num_bytes``, though the
    mean over the ranks of a chain is (n-1)/n of it: its last rank sends nothing.
    """
    if operation not in _FACTORS:
        raise ValueError(f"operation({operation}) is none of {', '.join(_FACTORS)}")
    if n < 1:
        raise ValueError(f"n({n}) < 1")
    return (
        _FACTORS[operation](n) * num_bytes if n > 1 else 0.0
    )  # one rank alone has nobody to send to


@dataclass(frozen=True, kw_only=True)
class Call:
    """Calls of one step that are alike: ``size`` bytes each, ``count`` times, on the ranks along ``group``'s axes.

    ``axis`` names what is shown as one; ``peer`` is the place on it that a message goes to, None of a collective.
    """

    axis: str
    op: str
    group: tuple[str, ...]
    ranks: int
    size: Equation
    count: Equation
    why: str
    peer: int | None = None

    @cached_property
    def num_bytes(self) -> float:
        return self.size.value

    @cached_property
    def times(self) -> float:
        return self.count.value

    @cached_property
    def sent(self) -> float:
        """Bytes that a rank sends in all of them, ring-optimal."""
        return self.times * sent_bytes(self.op, self.num_bytes, self.ranks)


def calls(at: Position) -> tuple[Call, ...]:
    """Return the calls of a rank in a whole step; axes of one rank make none."""
    made = (_tensor(at), _context(at), _experts(at), _pipeline(at), _shards(at), _sums(at))
    return tuple(call for of in made for call in of if call.ranks > 1 and call.times)


class Sends(Protocol):
    """A call, counted or by closed form: the bytes that a rank sends in it, over which axis."""

    @property
    def axis(self) -> str: ...
    @property
    def sent(self) -> float: ...


def bytes_by_axis(of: Iterable[Sends], axes: Iterable[str] = ()) -> dict[str, float]:
    """Return the bytes that a rank sends by axis, 0 over one of ``axes`` without calls."""
    sent: defaultdict[str, float] = defaultdict(float, dict.fromkeys(axes, 0.0))
    for call in of:
        sent[call.axis] += call.sent
    return dict(sent)


def equation_of(of: Iterable[Call]) -> Equation:
    """Return the bytes of some calls as one equation: how often, how large, and nccl-tests' factor of each."""
    terms: list[str] = []
    symbols: dict[str, float] = {}
    for call in of:
        ranks = "R" if symbols.get("R", call.ranks) == call.ranks else "X"
        factor = _FACTOR_TEXTS.get(call.op, "").replace("n", ranks)
        factors = (call.count.text, call.size.text, factor)
        terms.append(" ".join(_bracketed(text) for text in factors if text not in ("", "1")))
        symbols |= {**call.size.symbols, **call.count.symbols, ranks: call.ranks}
    return Equation(text=" + ".join(terms), symbols=symbols)


def _bracketed(text: str) -> str:
    outside = re.sub(r"\([^()]*(\([^()]*\)[^()]*)*\)", "", text)
    return f"({text})" if "+" in outside or "-" in outside else text


def _call(
    at: Position,
    axis: str,
    op: str,
    size: str,
    count: str,
    why: str,
    *,
    group: tuple[str, ...] = (),
    ranks: int = 0,
    peer: int | None = None,
    **own: float,
) -> Call:
    symbols = {**at.symbols, **own}
    members = group or (axis,)
    return Call(
        axis=at.spec.axis_names.get(axis, axis),
        op=op,
        group=members,
        ranks=ranks or at.spec.ranks_of(members),
        size=Equation(text=size, symbols=symbols),
        count=Equation(text=count, symbols=symbols),
        why=why,
        peer=peer,
    )


def _times(*factors: str) -> str:
    return " ".join(factor for factor in factors if factor != "1") or "1"


def _tensor(at: Position) -> Iterator[Call]:
    """TP: b s h e after attention and after the FFN, forward and backward, 8 b s h e (t-1)/t a layer.

    Four all_reduces, or with sequence parallelism as many all_gathers and reduce_scatters of the same bytes; Megatron
    gathers two more again. Experts are not split, which halves it. A layer that is computed again stops before the
    FFN's own sum. A split vocabulary gathers and scatters at both ends, whole ends gather; what every rank has whole
    sums its gradients, of which it saw its part of a sequence.
    """
    spec = at.spec
    blocks, layers = 1 if spec.moe else 2, "(L + D)" if at.dense_layers else "L"
    early = 1 if spec.forwards == 2 and not spec.planned and not spec.moe else 0
    passes = blocks * (spec.forwards + 1)
    if not spec.sequence_parallel and not spec.own_tokens:
        yield _call(
            at, "tp", "all_reduce", "b s h e", f"{passes - early:g} {layers} M", "activations"
        )
        return
    ends = {
        "vocabulary": at.embedding + at.head,
        "tokens": 0,
        "whole": 0 if spec.own_tokens else 2,
    }[spec.ends]
    gathers = f"({passes:g} {layers} + {ends}) M" if ends else f"{passes:g} {layers} M"
    scatters = f"{passes - early:g} {layers} M"
    if ends and spec.planned:
        scatters = f"({passes - early:g} {layers} + {ends}) M"
    yield _call(at, "tp", "all_gather", "b s h e", gathers, "activations")
    yield _call(at, "tp", "reduce_scatter", "b s h e", scatters, "activations")
    if spec.own_tokens:
        return  # whose gradients are means over all ranks
    if spec.ends == "whole":
        norms = (2 * at.layers + 1) * (2 if spec.shape.recipe == "gpt" else 1)
        yield _call(at, "tp", "all_reduce", "h e", "norms", "gradients of norms", norms=norms)
    else:
        whole = elements_of(at, "whole", ranks=spec.size("fsdp"), rank=at.coordinate["fsdp"])
        yield _call(at, "tp", "all_reduce", "whole e", "1", "gradients of norms", whole=whole)


@dataclass(frozen=True)
class _Exchange:
    """A call of attention over ``cp``, made so often in a layer's forward pass, and in its backward pass."""

    axis: str
    op: str
    size: str
    why: str
    ranks: int
    forward: int
    backward: int


def _attention(at: Position) -> tuple[_Exchange, ...]:
    """CP of attention: G j d / t elements of keys, and as many of values, in each forward and backward pass.

    A ring passes both on in c - 1 hops; backward again, and the sums of their gradients in float32. allgather_kv
    gathers both for each pass and scatters the sums of gradients. Ulysses exchanges queries, keys and values for heads,
    and the result back, 2 b (s/c) h e (1 + g) (c-1)/c. usp is a ring of c / u ranks around exchanges among u.
    """
    spec = at.spec
    method, ranks = spec.cp_method, spec.size("cp")
    keys, sums, inner = (
        "keys and values",
        "gradients of keys and values",
        spec.ulysses if method == "usp" else ranks,
    )
    both, latent = "2 G j d", spec.shape.latent is not None
    result = (
        "G h e / t"
        if spec.shape.heads * spec.shape.value_size == spec.shape.hidden
        else "G a u e / t"
    )
    if latent:  # whose keys and values are of every head
        both = "G a (d + u)"
    if method == "allgather_kv":
        size = f"{both} e c / t"
        return (
            _Exchange("cp", "all_gather", size, keys, ranks, 1, 1),
            _Exchange("cp", "reduce_scatter", size, sums, ranks, 0, 1),
        )
    found: tuple[_Exchange, ...] = ()
    if method in ("ulysses", "usp"):
        axis = "cp" if method == "ulysses" else "ulysses"
        first = "G a e (2 d + u) / t" if latent else "G d e (a + 2 j) / t"
        sizes = ((first, "queries, keys and values"), (result, "results"))
        found = tuple(_Exchange(axis, "all_to_all", size, why, inner, 1, 1) for size, why in sizes)
    if method != "ulysses":
        axis, ring = ("ring", ranks // inner) if method == "usp" else ("cp", ranks)
        hops = ring - 1
        found += (
            _Exchange(axis, "send", f"{both} e / t", keys, ring, hops, hops),
            _Exchange(axis, "send", f"{both} 4 / t", f"{sums} in float32", ring, 0, hops),
        )
    return found


def attention_bytes(at: Position) -> dict[str, dict[str, float]]:
    """Return the bytes that attention sends for one layer and microbatch, by direction and axis."""
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for one in _attention(at):
        sent = sent_bytes(one.op, Equation(text=one.size, symbols=at.symbols).value, one.ranks)
        for direction, times in (("forward", one.forward), ("backward", one.backward)):
            axis = found[direction]
            axis[one.axis] = axis.get(one.axis, 0.0) + times * sent
    return found


def _context(at: Position) -> Iterator[Call]:
    for one in _attention(at) if at.spec.size("cp") > 1 else ():
        count = _times(f"{at.spec.forwards * one.forward + one.backward:g}", "L M")
        yield _call(at, one.axis, one.op, one.size, count, one.why, group=("cp",), ranks=one.ranks)


def _experts(at: Position) -> Iterator[Call]:
    """EP where routes are even: k h e a token to its experts and back, each way; counts of tokens before them.

    Of ranks that split experts (etp) each takes the tokens of all X: tokens, weights and routes are gathered, sums
    scattered.
    """
    spec, moe = at.spec, at.spec.moe
    if moe is None:
        return
    layers = "(L - D) M" if at.dense_layers else "L M"
    forward, both, each_way = (
        f"{n:g} {layers}" for n in (spec.forwards, spec.forwards + 1, 2 * (spec.forwards + 1))
    )
    there_and_back = "tokens to their experts and back"
    yield _call(
        at, "ep", "all_to_all", "X n k h e", each_way, there_and_back, k=moe.top_k, X=moe.etp
    )
    if not spec.planned:
        yield _call(
            at, "ep", "all_to_all", f"E {COUNT_BYTES}", forward, "counts of tokens", E=moe.experts
        )
    for op, size, count in (
        ("all_gather", "X n h e", both),
        ("reduce_scatter", "X n h e", both),
        ("all_gather", "X n k e", forward),
        ("reduce_scatter", "X n k e", layers),
        ("all_gather", f"X n k {INDEX_BYTES}", forward),
    ):
        yield _call(
            at,
            "etp",
            op,
            size,
            count,
            "tokens, weights and routes of split experts",
            k=moe.top_k,
            X=moe.etp,
        )


def _pipeline(at: Position) -> Iterator[Call]:
    """PP: b s h e a microbatch, boundary and direction, to each rank that holds a neighbouring stage."""
    pp, last = at.spec.size("pp"), len(at.layers_by_stage) - 1
    if pp == 1:
        return
    holder = {stage: rank for rank in range(pp) for stage in at.stages_of(rank)}
    beside = [
        holder[other]
        for stage in at.stages
        for other in (stage - 1, stage + 1)
        if 0 <= other <= last
    ]
    for peer in sorted(set(beside) - {at.pp_rank}):
        boundaries = beside.count(peer)
        yield _call(
            at,
            "pp",
            "send",
            "n h e",
            "boundaries M",
            "activations",
            peer=peer,
            boundaries=boundaries,
        )


def _shards(at: Position) -> Iterator[Call]:
    """FSDP: parameters gathered for each pass, gradients scattered: 3 Psi e (n-1)/n a microbatch, unit by unit.

    Psi is padded parameter by parameter. What stays gathered until backward is gathered once; a pipeline gathers its
    stages and reduces once a step, 2 Psi e (n-1)/n.
    """
    spec = at.spec
    ranks = spec.size("fsdp")
    if ranks == 1:
        return
    once = spec.size("pp") > 1
    scatters = "M" if not once and (spec.planned or spec.each_microbatch) else "1"
    tables, mixtures = tables_of(at), "(L - D)" if at.dense_layers else "L"
    # a unit's symbol, how many are alike, its elements, who shard it, and whether it stays gathered
    units = [
        ("Psi", mixtures, padded_elements(tables.layers[0][1], ranks), "fsdp", False),
        ("root", "1", padded_elements(tables.ends, ranks), "fsdp", spec.keeps_root),
        (
            "experts",
            mixtures,
            layer_elements(at, "routed") if spec.planned else 0,
            "expert_shards",
            False,
        ),
        *(
            ("dense", "D", padded_elements(parts, ranks), "fsdp", False)
            for _, parts in tables.layers[1:]
        ),
    ]
    for symbol, alike, elements, group, kept in units:
        rounds = "1" if once else "M" if kept or not spec.reshard else "2 M"
        for op, times, why, width in (
            ("all_gather", rounds, "parameters", "e"),
            ("reduce_scatter", scatters, "gradients", spec.gradient_text),
        ):
            if elements:
                own: dict[str, Any] = {symbol: elements}
                yield _call(
                    at,
                    "fsdp",
                    op,
                    f"{symbol} {width}",
                    _times(times, alike),
                    why,
                    group=(group,),
                    **own,
                )


def _sums(at: Position) -> Iterator[Call]:
    """DP: gradients that a rank holds, all_reduced in buckets, 2 Psi e (n-1)/n, once or after each microbatch.

    cp's ranks sum theirs too. Copies of experts sum theirs apart, and so do those of split attention whose ranks take
    tokens of their own. ZeRO-1 as torch has it then broadcasts every parameter from the rank that updates it; as the
    literature has it gradients are scattered and parameters gathered, the bytes of the sum.
    """
    spec = at.spec
    rounds = "M" if spec.each_microbatch else "1"
    dense: tuple[Kind, ...] = ("whole",) if spec.own_tokens else ("whole", "split")
    data = ("dp", "cp", "tp") if spec.own_tokens else ("dp", "cp")
    if spec.zero1 == "reduce_scatter":
        yield from _scattered(at, data, rounds)
        return
    tables = tables_of(at)
    if spec.keeps_root:  # HSDP: each unit's shard of gradients is summed over the replicas
        shards = spec.size("fsdp")
        for parts, passes in ((tables.layers[0][1], "L M"), (tables.ends, "M")):
            shard = padded_elements(parts, shards) / shards
            yield _call(at, "dp", "all_reduce", "Psi e", passes, "gradients", group=data, Psi=shard)
    else:
        held = elements_of(at, *dense, ranks=spec.size("fsdp"), rank=at.coordinate["fsdp"])
        yield _summed(at, "dp", data, held, rounds)
    if spec.own_tokens:
        split = elements_of(at, "split")
        yield _call(
            at,
            "adp",
            "all_reduce",
            "Psi e",
            "1",
            "gradients of attention",
            group=("dp",),
            Psi=split,
        )
    if spec.moe:
        routed = elements_of(at, "routed") / (spec.expert_shards if spec.planned else 1)
        yield _summed(at, "edp", ("edp",), routed, "1")
    if spec.zero1 == "broadcast":
        owned: defaultdict[int, int] = defaultdict(int)
        for times, parts in (*tables.layers, (1, tables.ends)):
            for part in parts:
                owned[part.numel] += times
        for numel, count in owned.items():
            yield _call(
                at,
                "dp",
                "broadcast",
                "Psi e",
                "owned",
                "parameters",
                group=data,
                Psi=numel,
                owned=count,
            )


def _scattered(at: Position, data: tuple[str, ...], rounds: str) -> Iterator[Call]:
    """ZeRO-1 of the literature: each rank of those that hold the same gets its share of summed gradients."""
    held = [("dp", data, elements_of(at, "whole", "split"))]
    if at.spec.moe:
        held.append(("edp", ("edp",), elements_of(at, "routed")))
    for axis, group, elements in held:
        ranks = at.spec.ranks_of(group)
        whole = -(-elements // ranks) * ranks
        size = f"Psi {at.spec.gradient_text}"
        yield _call(at, axis, "reduce_scatter", size, rounds, "gradients", group=group, Psi=whole)
        yield _call(at, axis, "all_gather", "Psi e", "1", "parameters", group=group, Psi=whole)


def _summed(at: Position, axis: str, group: tuple[str, ...], elements: float, rounds: str) -> Call:
    buckets = at.spec.count_buckets(elements * at.spec.gradient_bytes)
    size, times = f"Psi {at.spec.gradient_text} / buckets", _times(rounds, "buckets")
    return _call(
        at, axis, "all_reduce", size, times, "gradients", group=group, Psi=elements, buckets=buckets
    )
