"""What the nightly gate finds and what it imagines, on simulated histories of whole nights.

python tests/studies/history_study.py [--trials 20] [--seed 1] [--every 1] prints, for 40 series over 31 nights that are
judged from the ninth on, each as ``parbench history check`` does, the share of nights on which any series is called
what; PR is SLOWER as of a pull request, whose one run is held against the nights before. Then how soon steps are found:
from the first night since on, and of one series, among 40 or alone, after five nights. A false alarm is a night that is
SLOWER where nothing stepped, or a pull request from the second night since a step on. Pools are of nodes half of which
are 20 % slower, one at random a night. A script, not a test: tests/reports/history/test_nights.py has a small part.
"""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing import Pool

import numpy as np
from numpy.typing import NDArray

from parbench.reports.history.levels import StepRule
from parbench.reports.history.nights import judge_nights

NUM_NIGHTS, FIRST, SINCE = 31, 9, 25
RULE = StepRule()
WORDS = ("SLOWER", "FASTER", "DRIFT", "SUSPECT", "PR")


@dataclass(frozen=True, kw_only=True)
class Model:
    """How nights scatter, in shares of a time; ``shared`` of the variance is of all series together.

    ``uneven``: series differ in how much slower they are on slower nodes. ``moved`` series step on night ``SINCE``.
    """

    scatter: float
    shared: float = 0.0
    rho: float = 0.0
    spikes: float = 0.0
    drift: float = 0.0
    nodes: int = 1
    uneven: bool = False
    step: float = 0.0
    moved: int = 40
    series: int = 40


QUIET = {f"independent {scatter:.0%}": Model(scatter=scatter) for scatter in (0.03, 0.05, 0.1, 0.2)}
QUIET |= {f"{one:.0%}, 10 % of spikes of 30 %": Model(scatter=one, spikes=0.1) for one in (0.03, 0.1)}
QUIET |= {"5%, half of it shared": Model(scatter=0.05, shared=0.5)}
QUIET |= {f"pool of {nodes} nodes, 3%": Model(scatter=0.03, nodes=nodes) for nodes in (2, 8, 40)}
QUIET |= {f"pool of 8 nodes, {one:.0%}": Model(scatter=one, nodes=8) for one in (0.1, 0.2)}
QUIET |= {"pool of 8 nodes, 3%, uneven": Model(scatter=0.03, nodes=8, uneven=True)}
QUIET |= {f"autocorrelation 0.6, {one:.0%}": Model(scatter=one, rho=0.6) for one in (0.03, 0.1)}
QUIET |= {"the same, half shared": Model(scatter=0.1, rho=0.6, shared=0.5)}
QUIET |= {f"drift of 0.3 % a night, {one:.0%}": Model(scatter=one, drift=0.003) for one in (0.01, 0.03, 0.1)}


def simulate(model: Model, random: np.random.Generator) -> tuple[NDArray[np.float64], list[str]]:
    """Return logs of times of shape (series, nights), and the node of each night."""
    noise = random.normal(size=(model.series + 1, NUM_NIGHTS))
    for i in range(1, NUM_NIGHTS):
        noise[:, i] = model.rho * noise[:, i - 1] + math.sqrt(1 - model.rho**2) * noise[:, i]
    logs = model.scatter * (math.sqrt(1 - model.shared) * noise[1:] + math.sqrt(model.shared) * noise[0])
    logs += (random.random(logs.shape) < model.spikes) * math.log(1.3)
    logs += math.log1p(model.drift) * np.arange(NUM_NIGHTS)
    node = random.integers(model.nodes, size=NUM_NIGHTS)
    slower = random.permutation(np.arange(model.nodes) % 2)[node] * math.log(1.2)
    logs += slower * (1.5 * random.random((model.series, 1)) if model.uneven else 1.0)
    logs[: model.moved, SINCE:] += math.log1p(model.step)
    return logs, [f"node-{i}" for i in node]


def called(model: Model, seed: tuple[int, int], nights: Iterable[int]) -> list[list[bool]]:
    """Return of each night which of the words any series is called, or all together."""
    logs, nodes = simulate(model, np.random.default_rng(seed))
    families, told = [i // 8 for i in range(model.series)], []
    for night in nights:
        window = slice(max(0, night - RULE.window), night)
        found = judge_nights(logs[:, window], nodes[window], families, [RULE] * model.series, RULE)
        told.append([False] * len(WORDS))
        for one in (*found.each, *([found.shared] if found.shared else [])):
            if one.sure and one.shift:
                is_drift = one.shift.slope is not None and one.shift.change > 0
                told[-1][2 if is_drift else 1 - (one.shift.change > 0)] = True
            told[-1][3] |= one.first is not None
        found = judge_nights(logs[:, window], nodes[window], families, [RULE] * model.series, RULE, alone=True)
        every = (*found.each, *([found.shared] if found.shared else []))
        told[-1][4] = any(one.first and not one.moved for one in every)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("trials", 20), ("seed", 1), ("every", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    with Pool(2) as pool:

        def rates(model: Model, nights: Iterable[int], trials: int) -> NDArray[np.float64]:
            asked = [(model, (given.seed, i), [*nights]) for i in range(trials)]
            found: NDArray[np.float64] = np.array(pool.starmap(called, asked), dtype=float)
            return np.asarray(found.mean(axis=0))

        print(f"share of nights on which any is called so, {given.trials} histories each")
        print(f"{'nothing steps':30}" + "".join(f"{word:>9}" for word in WORDS))
        for name, model in QUIET.items():
            if given.only in name:
                shares = rates(model, range(FIRST, NUM_NIGHTS + 1, given.every), given.trials).mean(axis=0)
                print(f"{name:30}" + "".join(f"{share:9.3f}" for share in shares), flush=True)
        if given.only:
            return
        print(f"{'a step':30}  called SLOWER (SUSPECT, PR) on nights 1 to 5 since; of one series after 5, of 40; alone")
        for scatter in (0.02, 0.05):
            for step, moved in ((0.05, 40), (0.1, 40), (1.0, 1)):
                model = Model(scatter=scatter, step=step, moved=moved)
                soon = rates(model, range(SINCE + 1, SINCE + 6), given.trials)
                among = rates(replace(model, moved=1), [SINCE + 5], 4 * given.trials)[0, 0]
                alone = rates(replace(model, moved=1, series=1), [SINCE + 5], 20 * given.trials)[0, 0]
                nights = " ".join(f"{one[0]:.2f} ({one[3]:.2f}, {one[4]:.2f})" for one in soon)
                name = f"{step:+.0%} in {moved} at {scatter:.0%}"
                print(f"{name:30}  {nights}; {among:.2f}; {alone:.2f}", flush=True)


if __name__ == "__main__":
    main()
