"""JUnit's XML schema as Jenkins has it (junit-10.xsd), from the source of pytest, which tests its own with it."""

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "9.2.0"
SHA256 = "97c4f3b1f3c7414aa36465e09b8220f1d03627993bd51b1282e193753c80557b"
CACHE = Path.home() / ".cache" / "parbench" / f"pytest-{VERSION}.tar.gz"


def schema_source() -> str:
    """Return the schema, fetched with pip where it is not kept yet, and proved by its digest."""
    if not CACHE.is_file():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            f"pytest=={VERSION}",
            "--no-deps",
            "--no-binary",
            "pytest",
        ]
        command += ["--quiet", "--dest", str(CACHE.parent)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, (
            f"pip could not fetch the source of pytest {VERSION}: {done.stderr}"
        )
    assert hashlib.sha256(CACHE.read_bytes()).hexdigest() == SHA256, (
        f"{CACHE} is not pytest {VERSION}"
    )
    with tarfile.open(CACHE) as archive:
        file = archive.extractfile(f"pytest-{VERSION}/testing/example_scripts/junit-10.xsd")
        assert file is not None
        return file.read().decode()
