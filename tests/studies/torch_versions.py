"""Run the default tests on several releases of torch, each in a new environment.

    python -m tests.studies.torch_versions                   # three releases on this Python
    python -m tests.studies.torch_versions --torch 2.11.0 --python python3.12 -- tests/bench -x

Releases from PyPI are CUDA builds of 5 GB. They are installed one at a time and deleted unless
``--keep`` is given. Other packages have the versions of ``constraints.txt``. Arguments after ``--``
go to pytest. The exit code is 1 if a test failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.paths import ROOT

RELEASES = ("2.11.0", "2.13.0", "2.15.0")
MIN_FREE_BYTES = 12 * 10**9
COLUMNS = ("torch", "python", "passed", "failed", "errors", "seconds")
VERSION_SCRIPT = "import platform, torch; print(torch.__version__, platform.python_version())"


def create_environment(folder: Path, python: str, torch: str) -> None:
    """Create a virtual environment with a release of torch and the dependencies of the tests."""
    if shutil.disk_usage(folder.parent).free < MIN_FREE_BYTES:
        required_gb = MIN_FREE_BYTES / 1e9
        raise SystemExit(f"{folder.parent} has less than {required_gb:.0f} GB of free space")
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    without_torch = [line for line in constraints if not line.startswith("torch==")]
    file = folder.with_suffix(".txt")
    file.write_text("\n".join(without_torch))
    subprocess.run([python, "-m", "venv", folder], check=True)
    options = ["-q", "--no-compile", "--no-cache-dir", "-c", str(file)]
    packages = [f"torch=={torch}", "-e", f"{ROOT}[test]"]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install"]
    subprocess.run([*pip, *options, *packages], check=True)


def run_tests(python: str, pytest_args: list[str]) -> dict[str, str]:
    """Run the tests, print their output, and return a row of the table."""
    versions = subprocess.run(
        [python, "-c", VERSION_SCRIPT], check=True, capture_output=True, text=True
    )
    torch_version, python_version = versions.stdout.split()
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *pytest_args]
    start = time.perf_counter()
    last_line = ""
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last_line = line
    return {
        "torch": torch_version,
        "python": python_version,
        "seconds": f"{time.perf_counter() - start:.0f}",
        **parse_counts(last_line, process.returncode),
    }


def parse_counts(last_line: str, exit_code: int) -> dict[str, str]:
    """Return the counts in the last line of pytest, or its exit code where it has none."""
    counts = {"passed": "0", "failed": "0", "errors": "0"}
    matches = re.findall(r"(\d+) (passed|failed|error)", last_line)
    if not matches:
        return dict.fromkeys(counts, f"exit {exit_code}")
    for count, name in matches:
        counts["errors" if name == "error" else name] = count
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="*", default=RELEASES)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--keep", action="store_true", help="keep and reuse the environments")
    parser.add_argument("pytest_args", nargs="*", metavar="-- ARGUMENT")
    options = parser.parse_args()
    rows = []
    for torch in options.torch:
        folder = options.folder / f"torch-{torch}"
        try:
            if not folder.exists():
                create_environment(folder, options.python, torch)
            rows.append(run_tests(str(folder / "bin" / "python"), options.pytest_args))
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_suffix(".txt").unlink(missing_ok=True)
    print()
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(row[name] for name in COLUMNS) + " |")
    return int(any(row["failed"] != "0" or row["errors"] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
