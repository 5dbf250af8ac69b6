"""What screening says: a verdict for each node and link with its evidence, the table and the line to paste. Pure."""

from collections.abc import Mapping

import msgspec

from slurm.screen.fit import SUSPECT, Effect, Exchange, Slow, link_effects, node_effects


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One node (or the two of a link): fine, slow, unconfirmed, did not answer or cannot tell, and why.

    ``factor`` is how many times longer its exchanges take than the others', with a 95 % interval; None is unknown.
    """

    nodes: tuple[str, ...]
    verdict: str
    factor: float | None = None
    low: float | None = None
    high: float | None = None
    evidence: str = ""

    @property
    def name(self) -> str:
        """The node, or the link as ``n1-n2``."""
        return "-".join(self.nodes)


class Screening(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts on all nodes, on the links that are not fine, and what else there is to say."""

    nodes: tuple[Verdict, ...]
    links: tuple[Verdict, ...] = ()
    least_factor: float | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def exclude(self) -> str:
        """The option that keeps Slurm from the nodes that are slow or did not answer; empty if there is none."""
        bad = [verdict.name for verdict in self.nodes if verdict.verdict in ("slow", "did not answer")]
        return f"--exclude={','.join(bad)}" if bad else ""

    @property
    def code(self) -> int:
        """The exit code: 4 where something did not run, else 1 where something is slow, else 0."""
        words = {verdict.verdict for verdict in (*self.nodes, *self.links)}
        if self.problems or words & {"did not answer", "cannot tell", "unconfirmed"}:
            return 4
        return 1 if "slow" in words else 0


def screening(
    hosts: tuple[str, ...],
    exchanges: tuple[Exchange, ...],
    suspects: Slow,
    confirmed: Slow | None,
    silent: Mapping[str, str],
) -> Screening:
    """Return the verdicts; ``confirmed`` is None where suspects could not be measured again, so nobody is blamed.

    Those that are fine are weighed by all exchanges, those made to confirm suspects too.
    """
    blamed = suspects if confirmed is None else confirmed
    effects = node_effects(exchanges, blamed, SUSPECT)
    nodes = [_node(rank, hosts, effects.get(rank), suspects, confirmed) for rank in range(len(hosts))]
    lost = [Verdict(nodes=(host,), verdict="did not answer", evidence=reason) for host, reason in silent.items()]
    least = [effect.least for effect in effects.values()]
    return Screening(
        nodes=tuple(sorted([*nodes, *lost], key=lambda verdict: _natural(verdict.name))),
        links=tuple(_link(effect, hosts, exchanges, confirmed) for effect in suspects.links),
        least_factor=max(least) if least else None,
    )


def _node(rank: int, hosts: tuple[str, ...], effect: Effect | None, suspects: Slow, confirmed: Slow | None) -> Verdict:
    first = next((found for found in suspects.nodes if found.ranks == (rank,)), None)
    if first is None:
        return _verdict(hosts, (rank,), "fine" if effect else "cannot tell", effect, _met(effect, hosts))
    looked = f"{first.factor:.2f}x {_met(first, hosts)}"
    if confirmed is None:
        return _verdict(hosts, (rank,), "unconfirmed", first, f"{looked}; not measured again")
    again = next((found for found in confirmed.nodes if found.ranks == (rank,)), None)
    if again is None:
        return _verdict(hosts, (rank,), "fine", effect, f"{looked} at first; not when measured again")
    return _verdict(hosts, (rank,), "slow", again, f"{looked}; again {_met(again, hosts)}")


def _link(effect: Effect, hosts: tuple[str, ...], exchanges: tuple[Exchange, ...], confirmed: Slow | None) -> Verdict:
    looked = f"{effect.factor:.2f}x in {_exchanges(effect)} beyond what either node is with others"
    if confirmed is None:
        return _verdict(hosts, effect.ranks, "unconfirmed", effect, f"{looked}; not measured again")
    again = next((found for found in confirmed.links if found.ranks == effect.ranks), None)
    if again is None:
        alone = link_effects(exchanges, confirmed, SUSPECT).get((effect.ranks[0], effect.ranks[1]))
        return _verdict(hosts, effect.ranks, "fine", alone, f"{looked} at first; not when measured again")
    return _verdict(hosts, effect.ranks, "slow", again, f"{looked}; again in {again.turns} more")


def _verdict(
    hosts: tuple[str, ...], ranks: tuple[int, ...], word: str, effect: Effect | None, evidence: str
) -> Verdict:
    nodes = tuple(hosts[rank] for rank in ranks)
    if effect is None:
        return Verdict(nodes=nodes, verdict=word, evidence=evidence)
    factor, low, high = (round(value, 4) for value in (effect.factor, effect.low, effect.high))
    return Verdict(nodes=nodes, verdict=word, factor=factor, low=low, high=high, evidence=evidence)


def _met(effect: Effect | None, hosts: tuple[str, ...]) -> str:
    if effect is None:
        return "it met fewer than two nodes that are fine"
    return f"with {', '.join(hosts[rank] for rank in effect.partners)} in {_exchanges(effect)}"


def _exchanges(effect: Effect) -> str:
    return "1 exchange" if effect.turns == 1 else f"{effect.turns} exchanges"


def _natural(name: str) -> tuple[str, int, str]:
    """Order n2 before n10."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name.rstrip("0123456789"), int(digits or 0), name


def render(found: Screening) -> str:
    """Return the table, what else there is to say, and last the line to paste."""
    verdicts = [*found.nodes, *(link for link in found.links)]
    rows = [("node", "verdict", "time", "evidence")]
    rows += [(verdict.name, verdict.verdict, _times(verdict), verdict.evidence) for verdict in verdicts]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    if found.least_factor is not None:
        lines.append(f"a node would have been suspected from {found.least_factor:.2f} times the others' time")
    lines += [f"not measured: {problem}" for problem in found.problems]
    lines += [f"link {link.name} is slow, its nodes are not: leave out one of them" for link in _slow_links(found)]
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"run: {run}" for run in found.runs]
    return "\n".join([*(line.rstrip() for line in lines), found.exclude or "nothing to exclude"])


def _slow_links(found: Screening) -> list[Verdict]:
    return [link for link in found.links if link.verdict == "slow"]


def _times(verdict: Verdict) -> str:
    if verdict.factor is None or verdict.low is None or verdict.high is None:
        return "-"
    return f"{verdict.factor:.2f}x ({verdict.low:.2f}-{verdict.high:.2f})"
