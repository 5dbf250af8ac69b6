"""The default tests on several releases of torch, each in an environment of its own that is made for it.

python -m tests.studies.torch_versions                          # 2.11.0, 2.13.0 and 2.15.0 on this Python
python -m tests.studies.torch_versions --torch 2.11.0 --python python3.12 --keep -- tests/workloads/pipeline_parallel -x

From PyPI they are CUDA builds of 5 GB: one at a time, and gone after use but for ``--keep``. Of the other packages
they have what ``constraints.txt`` says. What follows ``--`` goes to pytest. Exit code 1 where a test failed.
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

ROOT = Path(__file__).parents[2]
TESTED = ("2.11.0", "2.13.0", "2.15.0")
LEAST_FREE_GB = 12
FIELDS = ("torch", "python", "passed", "failed", "errors", "seconds")


def make(folder: Path, python: str, torch: str) -> str:
    """Make an environment with a release of torch and what the tests need; return its Python."""
    constraints = folder.with_suffix(".txt")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [
        str(folder / "bin/python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "--no-cache-dir",
    ]
    subprocess.run(
        [*pip, "-c", str(constraints), f"torch=={torch}", "-e", f"{ROOT}[test]"], check=True
    )
    return str(folder / "bin/python")


def tested(python: str, pytest_args: list[str]) -> dict[str, str]:
    """Run the tests and return what they say, the table's row."""
    asked = "import platform, torch; print(torch.__version__, platform.python_version())"
    versions = subprocess.run(
        [python, "-c", asked], check=True, capture_output=True, text=True
    ).stdout.split()
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    start, last = time.perf_counter(), ""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *pytest_args]
    env = {**os.environ, "PATH": path}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            last = line
    seconds = f"{time.perf_counter() - start:.0f}"
    return (
        row_of(last, run.returncode)
        | dict(zip(("torch", "python"), versions, strict=True))
        | {"seconds": seconds}
    )


def row_of(last_line: str, exit_code: int) -> dict[str, str]:
    """Return the counts in pytest's last line; unknown where it did not come to one."""
    found = {
        word.rstrip("s"): count
        for count, word in re.findall(r"(\d+) (passed|failed|errors?)", last_line)
    }
    if not found:
        return dict.fromkeys(("passed", "failed", "errors"), f"exit {exit_code}")
    return {name: found.get(name.rstrip("s"), "0") for name in ("passed", "failed", "errors")}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="*", default=TESTED)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--keep", action="store_true", help="leave the environments, and use those that were left"
    )
    parser.add_argument("pytest_args", nargs="*", metavar="-- ARGUMENT")
    asked = parser.parse_args(arguments)
    rows = []
    for torch in asked.torch:
        folder = asked.folder / f"torch-{torch}"
        try:
            if not folder.exists():
                if shutil.disk_usage(asked.folder).free < LEAST_FREE_GB * 1e9:
                    raise SystemExit(
                        f"{asked.folder} has less than the {LEAST_FREE_GB} GB that torch {torch} may take"
                    )
                make(folder, asked.python, torch)
            rows.append(tested(str(folder / "bin/python"), asked.pytest_args))
        finally:
            if not asked.keep:
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_suffix(".txt").unlink(missing_ok=True)
    print()
    print("| " + " | ".join(FIELDS) + " |\n|" + "---|" * len(FIELDS))
    for row in rows:
        print("| " + " | ".join(row[name] for name in FIELDS) + " |")
    return int(any(row["failed"] != "0" or row["errors"] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
