"""Check that the tests detect a broken product: break it in one named place after the other.

    python -m tests.studies.mutation [WORD ...] [--tier default|full|both|cuda_stub]

Each place of ``mutations.toml`` whose name contains a WORD is broken in a copy of this checkout.
The tests run on the copy until one fails, those next to the broken file first. A test that also
fails on the unbroken copy does not count. ``both``, the default, runs the full tier where the
default tier detects nothing. ``cuda_stub`` runs the tests on stub GPUs. The exit code is 1 if any
place is undetected.
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
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKER_BY_TIER = {"default": "not full", "full": "full", "cuda_stub": "cuda_stub"}
UNDETECTED = "undetected"
COLLECTION_ERROR = "tests/test_architecture.py"
"""Stands for the tests as a whole where pytest ends without the name of a test."""

NO_TESTS_COLLECTED = 5
PYTEST_OPTIONS = ("-q", "-x", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A text that occurs once in a file of the product, and the text that breaks it."""

    name: str
    path: str
    old: str
    new: str

    def find_test_paths(self, tree: Path, tier: str) -> list[str]:
        """Return paths of tests from the nearest to all: test file, folder, package, everything.

        A path without tests is left out. pytest would refuse it as if the product were broken.
        """
        if tier == "cuda_stub":
            return ["tests/fake_cuda"]
        folder = Path("tests") / Path(self.path).parent
        pattern = f"test_*{Path(self.path).stem}*.py"
        files = [str(path.relative_to(tree)) for path in sorted((tree / folder).glob(pattern))]
        folders = [str(folder), str(Path(*folder.parts[:2])), "tests"]
        return [*files, *(name for name in folders if (tree / name).is_dir())]


def load_places() -> list[Place]:
    with Path(__file__).with_name("mutations.toml").open("rb") as file:
        return [Place(**entry) for entry in tomllib.load(file)["place"]]


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks, links included."""
    listed = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def find_failed_test(tree: Path, test_path: str, tier: str) -> str | None:
    """Return the first test of a tier that fails in a tree, or None."""
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, "--ignore=tests/studies"]
    completed = subprocess.run(
        [*command, "-m", MARKER_BY_TIER[tier], test_path],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode in (0, NO_TESTS_COLLECTED):
        return None
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", completed.stdout, re.MULTILINE)
    return match[1] if match else COLLECTION_ERROR


def detect(tree: Path, place: Place, tier: str) -> str | None:
    """Return the test of a tier that detects a broken place, or None."""
    file = tree / place.path
    original = file.read_text()
    file.write_text(original.replace(place.old, place.new))
    try:
        failed_test = None
        for test_path in place.find_test_paths(tree, tier):
            failed_test = failed_test or find_failed_test(tree, test_path, tier)
    finally:
        file.write_text(original)
    if failed_test and find_failed_test(tree, failed_test.partition("[")[0], tier):
        print(f"    {failed_test} also fails on the unbroken product", file=sys.stderr)
        return None
    return failed_test


def find_detecting_tier(tree: Path, place: Place, tiers: list[str]) -> tuple[str, str]:
    """Return the first tier that detects a broken place and its test."""
    for tier in tiers:
        test = detect(tree, place, tier)
        if test:
            return tier, test
    return UNDETECTED, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--tier", choices=[*MARKER_BY_TIER, "both"], default="both")
    options = parser.parse_args()
    tiers = ["default", "full"] if options.tier == "both" else [options.tier]
    places = load_places()
    if options.words:
        places = [
            place for place in places if any(word in place.name for word in options.words)
        ]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        for place in places:
            start = time.monotonic()
            tier, test = find_detecting_tier(Path(folder), place, tiers)
            counts[tier] += 1
            seconds = time.monotonic() - start
            print(f"{tier:<10} {place.name:<60} {seconds:5.0f} s  {test}", flush=True)
    summary = ", ".join(f"{tier} {count}" for tier, count in counts.items())
    print(f"{len(places)} places: {summary}")
    sys.exit(1 if counts[UNDETECTED] else 0)


if __name__ == "__main__":
    main()
