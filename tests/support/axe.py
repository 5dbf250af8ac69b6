"""axe-core, the checker of accessibility, as npm has it: one version, proved by its digest, kept once it is there."""

import base64
import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

VERSION = "4.14.1"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
CACHE = Path.home() / ".cache" / "parbench" / f"axe-core-{VERSION}.tgz"
MISSING = f"no axe-core: {CACHE} is not there, and npm, which would fetch axe-core@{VERSION}, is not in PATH"


def axe_source() -> str:
    if not CACHE.is_file():
        npm = shutil.which("npm")
        assert npm is not None, MISSING
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        command = [
            npm,
            "pack",
            f"axe-core@{VERSION}",
            "--silent",
            "--pack-destination",
            str(CACHE.parent),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"npm could not fetch axe-core@{VERSION}: {done.stderr}"
    digest = base64.b64encode(hashlib.sha512(CACHE.read_bytes()).digest()).decode()
    assert digest == SHA512, f"{CACHE} is not axe-core {VERSION}"
    with tarfile.open(CACHE) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()
