"""A Python that writes a run instead of measuring one, for what launches ``parbench run``."""

import sys
from pathlib import Path

from tests.support.history_fixtures import write_history_run

FAKE = """#!{python}
import os, shutil, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
number = len(list(folder.glob("*"))) if folder.exists() else 0
shutil.copytree({run!r}, folder / f"run-{{number}}")
(folder / f"run-{{number}}" / "told").write_text("\\n".join([os.environ.get("X", ""), *sys.argv[1:]]))
"""


def python_that_runs(file: Path, script: str) -> str:
    file.write_text(script)
    file.chmod(0o755)
    return str(file)


def fake(tmp_path: Path) -> str:
    """Return a Python that writes a run, and beside it the variable X and the words it was told."""
    run = str(write_history_run(tmp_path / "template", 0))
    return python_that_runs(tmp_path / "python", FAKE.format(python=sys.executable, run=run))
