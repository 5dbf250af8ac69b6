"""axe-core, the checker of accessibility: one version from npm, checked by its digest."""

import base64
import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

VERSION = "4.14.1"
SHA512 = (
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)
CACHE = Path.home() / ".cache" / "parbench" / f"axe-core-{VERSION}.tgz"


def axe_source() -> str:
    """Return the script, which npm downloads once."""
    if not CACHE.is_file():
        npm = shutil.which("npm")
        assert npm is not None, f"{CACHE} is missing, and npm is not in PATH"
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", f"axe-core@{VERSION}", "--silent"]
        command += ["--pack-destination", str(CACHE.parent)]
        subprocess.run(command, timeout=120, check=True)
    digest = base64.b64encode(hashlib.sha512(CACHE.read_bytes()).digest()).decode()
    assert digest == SHA512, f"{CACHE} is not axe-core {VERSION}"
    with tarfile.open(CACHE) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()
