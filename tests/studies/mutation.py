"""Whether the tests see a product that is wrong: it is broken in one named place after the other.

python -m tests.studies.mutation [WORD ...] [--tier default|full|both] breaks a copy of this checkout in each place of
mutations.toml (those whose name holds a WORD), runs the tests on it until one fails, those that mirror the broken file
first, and prints which tier saw it by which test. A test that fails without the break too does not count. ``both``, the
default, asks the full tier where the default tier saw nothing: it ends with 1 if neither did. A script, not a test: a
tier that sees nothing runs to its end.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIERS = {"default": "not full", "full": "full"}
_CRASHED = "the tests could not run"


@dataclass(frozen=True, kw_only=True)
class Place:
    """One place where the product is made wrong: ``old``, which stands once in the file, becomes ``new``."""

    name: str
    path: str
    old: str
    new: str

    def break_in(self, tree: Path) -> str:
        """Break the file in a tree and return what it was; ``ValueError`` if the text is not there just once."""
        file = tree / self.path
        text = file.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.path} holds {text.count(self.old)} times {self.old!r}, not once"
            )
        file.write_text(text.replace(self.old, self.new))
        return text

    def groups(self, tree: Path) -> Iterator[list[str]]:
        """Yield the tests in the order in which they are asked: those nearest to the broken file first."""
        folder, stem = Path("tests") / Path(self.path).parent, Path(self.path).stem
        near = [
            str(path.relative_to(tree))
            for path in sorted((tree / folder).glob(f"test_*{stem}*.py"))
        ]
        yield from ([each] for each in (*near, str(folder), str(Path(*folder.parts[:2])), "tests"))


def places() -> tuple[Place, ...]:
    with Path(__file__).with_name("mutations.toml").open("rb") as file:
        return tuple(Place(**place) for place in tomllib.load(file)["place"])


def copy_tree(target: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def first_failure(tree: Path, tests: list[str], tier: str) -> str | None:
    """Return the first test of a tier that fails in a tree, None if all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-rfE",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, "-m", TIERS[tier], *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in (0, 5):  # 5: none of these tests is in the tier
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found else _CRASHED


def seen_by(tree: Path, place: Place, tier: str) -> str | None:
    """Return the test of a tier that fails in the broken tree and passes in the whole one, None if there is none."""
    whole = place.break_in(tree)
    try:
        failed = next(
            (found for tests in place.groups(tree) if (found := first_failure(tree, tests, tier))),
            None,
        )
    finally:
        (tree / place.path).write_text(whole)
    test = failed.partition("[")[0] if failed and failed != _CRASHED else "tests/test_house.py"
    if failed and first_failure(tree, [test], tier):
        print(f"    {failed} fails without the break too", file=sys.stderr)
        return None
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--tier", choices=[*TIERS, "both"], default="both")
    given = parser.parse_args()
    chosen = [
        place
        for place in places()
        if not given.words or any(word in place.name for word in given.words)
    ]
    counts = dict.fromkeys([*TIERS, "nobody"], 0)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for place in chosen:
            began = time.monotonic()
            tiers = TIERS if given.tier == "both" else [given.tier]
            tier, test = next(
                ((tier, test) for tier in tiers if (test := seen_by(tree, place, tier))),
                ("nobody", ""),
            )
            counts[tier] += 1
            print(
                f"{tier:<8} {place.name:<60} {time.monotonic() - began:5.0f} s  {test}", flush=True
            )
    print(
        f"{len(chosen)} places: "
        + ", ".join(f"{count} seen by {tier}" for tier, count in counts.items())
    )
    sys.exit(1 if counts["nobody"] else 0)


if __name__ == "__main__":
    main()
