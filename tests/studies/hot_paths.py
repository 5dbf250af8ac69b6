"""parbench's own hot paths, this tree against another, in turns (ABBA), judged by the gate's own rule.

python tests/studies/hot_paths.py BASE [--launches 6] times what tests/test_hot_paths.py holds with pytest-benchmark,
each launch in a process of its own: with the code in BASE, a checkout of the commit before, and with that of this
tree. It prints a line for each path, and exits with 1 if one is slower and 2 if nothing could be compared. BASE's
dependencies are those of this Python. A script, not a test.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parbench.reports.regression.compare_words import effect_words
from parbench.reports.regression.rule import Effect, Judgement, Pair, Rule, effects, judge

TREE = Path(__file__).parents[2]
PATHS = TREE / "tests" / "test_hot_paths.py"
Launches = Sequence[Mapping[str, float]]
"""A launch's medians in seconds by the name of the path."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What is said of one path; ``effect`` is None where a side does not have it in each launch."""

    name: str
    word: str
    effect: Effect | None = None


def launch(tree: Path) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PATHS)]
        command += [
            "--benchmark-disable-gc",
            "--benchmark-max-time=0.5",
            "--benchmark-min-rounds=3",
            f"--benchmark-json={file}",
        ]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"{tree}:\n{done.stdout}{done.stderr}", file=sys.stderr)
        return medians(json.loads(file.read_text())) if file.exists() and file.stat().st_size else {}


def medians(found: Mapping[str, object]) -> Mapping[str, float]:
    benchmarks = found["benchmarks"]
    assert isinstance(benchmarks, list)
    return {one["name"]: one["stats"]["median"] for one in benchmarks}


def in_turns(base: Path, count: int) -> tuple[Launches, Launches]:
    sides: tuple[list[Mapping[str, float]], list[Mapping[str, float]]] = ([], [])
    for i in range(2 * count):
        side = i % 4 in (1, 2)
        sides[side].append(launch(TREE if side else base))
    return sides


def lines(base: Launches, new: Launches, rule: Rule) -> list[Line]:
    """Return what is said of each path, all judged together, each a family of its own."""
    names = dict.fromkeys(name for found in (*base, *new) for name in found)
    whole = [name for name in names if all(name in found for found in (*base, *new))]
    if not whole or min(len(base), len(new)) < rule.min_launches:
        return [Line(name=name, word="INSUFFICIENT" if name in whole else "MISSING") for name in names]
    sides = [[{i: one[name] for i, one in enumerate(side)} for name in whole] for side in (base, new)]
    _, found_of = effects([[Pair(base=ours, new=theirs)] for ours, theirs in zip(*sides, strict=True)], rule)
    judged: Sequence[tuple[Judgement, ...]] = judge(found_of, rule)
    said = {
        name: Line(name=name, word=words[0].word, effect=found)
        for name, (found,), words in zip(whole, found_of, judged, strict=True)
    }
    return [said.get(name, Line(name=name, word="MISSING")) for name in names]


def code(found: Sequence[Line]) -> int:
    """Return 1 if a path is slower, 2 if none could be compared, else 0."""
    words = {line.word for line in found}
    if "SLOWER" in words:
        return 1
    return 0 if words - {"MISSING", "INSUFFICIENT"} else 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("--launches", type=int, default=6)
    given = parser.parse_args()
    found = lines(*in_turns(given.base.resolve(), given.launches), Rule())
    for line in found:
        detectable = f"{100 * line.effect.detectable:.0f} %" if line.effect and line.effect.detectable else "-"
        print(f"{line.word:12}  {line.name:32}  {effect_words(line.effect):28}  detectable {detectable}")
    sys.exit(code(found))


if __name__ == "__main__":
    main()
