"""The environment of the stub: torch's CUDA build with the stub in place of CUDA's libraries.

``python -m tests.fake_cuda.build`` makes both in a cache folder and prints where they are. Later
calls take what is there. README.md describes the folder.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fake_cuda.symbols import write_generated
from tests.support.paths import ROOT

TORCH_VERSION = os.environ.get("FAKE_CUDA_TORCH", "2.14.1")
"""A version that resolves to a CUDA build on the package index in use."""

CACHE = Path(os.environ.get("FAKE_CUDA_CACHE", "~/.cache/parbench/fake_cuda")).expanduser()
SOURCES = Path(__file__).parent / "src"
COMPILER = "cc"
CUDA_PACKAGE = re.compile(r"(nvidia|cuda|triton)\b")
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
REQUIREMENTS_SCRIPT = """
import importlib.metadata, json
print(json.dumps(importlib.metadata.requires("torch")))
"""
EXTENSION = """\
[torch.backends]
fake_cuda = tests.fake_cuda.kernels:register
"""
VERSION_SCRIPT = "import runpy, sys; print(runpy.run_path(sys.argv[1])['cuda'])"


@dataclass(frozen=True)
class Installation:
    """Folders of an environment for one version of torch."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv/bin/python"

    @property
    def torch(self) -> Path:
        [folder] = (self.folder / "venv/lib").glob("python*/site-packages/torch")
        return folder

    @property
    def headers(self) -> Path:
        """The folder with ``cuda_runtime_api.h``."""
        [header] = (self.folder / "headers").glob("nvidia/*/include/cuda_runtime_api.h")
        return header.parent

    @property
    def libraries(self) -> Path:
        """The folder that stands for CUDA's libraries; another one for other sources."""
        digest = hashlib.sha256()
        for path in [
            *sorted(SOURCES.rglob("*.[ch]")),
            Path(write_generated.__code__.co_filename),
        ]:
            digest.update(path.read_bytes())
        return self.folder / f"lib-{digest.hexdigest()[:12]}"


def run(*command: str | Path) -> str:
    """Run a command and return its output; raise with the errors it printed."""
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        command_line = " ".join(map(str, command))
        raise RuntimeError(
            f"{command_line} failed:\n{completed.stdout[-2000:]}{completed.stderr[-4000:]}"
        )
    return completed.stdout


def install() -> Installation:
    """Return the environment, made in some minutes if it is not there."""
    name = f"torch-{TORCH_VERSION}-python{sys.version_info.major}.{sys.version_info.minor}"
    installation = Installation(CACHE / name)
    marker = installation.folder / "complete"
    requirements = list_requirements()
    if not marker.exists():
        shutil.rmtree(installation.folder, ignore_errors=True)
        _install_torch(installation)
        _install_headers(installation)
    if not marker.exists() or marker.read_text().splitlines() != requirements:
        _pip(installation, *requirements)
        marker.write_text("\n".join(requirements))
    if not installation.libraries.exists():
        compile_stub(installation)
    return installation


def list_requirements() -> list[str]:
    """Return the requirements of this checkout, except for torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line for line in project["dependencies"] if not line.startswith("torch")]


def _pip(installation: Installation, *arguments: str) -> None:
    run(installation.python, "-m", "pip", "install", "--quiet", *arguments)


def _install_torch(installation: Installation) -> None:
    """Install torch without CUDA's libraries, its other requirements, and this checkout."""
    run(sys.executable, "-m", "venv", installation.folder / "venv")
    _pip(installation, "--no-deps", f"torch=={TORCH_VERSION}")
    output = run(installation.python, "-c", REQUIREMENTS_SCRIPT)
    requirements = [line for line in json.loads(output) if not CUDA_PACKAGE.match(line)]
    _pip(installation, *(line for line in requirements if "extra ==" not in line))
    _pip(installation, "--no-deps", "-e", str(ROOT))
    extension = installation.torch.parent / "fake_cuda-0.dist-info"
    extension.mkdir()
    (extension / "METADATA").write_text("Metadata-Version: 2.1\nName: fake_cuda\nVersion: 0\n")
    (extension / "entry_points.txt").write_text(EXTENSION)


def _install_headers(installation: Installation) -> None:
    version_file = installation.torch / "version.py"
    cuda_version = run(installation.python, "-c", VERSION_SCRIPT, version_file).strip()
    if cuda_version == "None":
        raise RuntimeError(f"torch {TORCH_VERSION} of this package index has no CUDA")
    folder = str(installation.folder / "headers")
    _pip(
        installation, "--no-deps", "--target", folder, f"nvidia-cuda-runtime=={cuda_version}.*"
    )


def compile_stub(installation: Installation) -> None:
    """Compile the stub and give it the names of all CUDA libraries that torch needs."""
    folder = installation.libraries
    building = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    library = building / "libfakecuda.so"
    torch_libraries = sorted((installation.torch / "lib").glob("*.so*"))
    options = ["-std=gnu11", "-O1", "-g", "-fPIC", "-Wall", "-Wno-unused-parameter", "-pthread"]
    options += [f"-I{SOURCES / 'include'}", f"-I{installation.headers}"]
    sources = sorted(SOURCES.glob("*.c"))
    objects = [building / f"{source.stem}.o" for source in sources]
    for source, target in zip(sources, objects, strict=True):
        run(COMPILER, *options, "-c", "-o", target, source)
    generated = building / "generated.c"
    write_generated(generated, torch_libraries, objects)
    run(COMPILER, *options, "-shared", "-o", library, generated, *objects)
    for name in find_needed(torch_libraries):
        (building / name).symlink_to(library.name)
    building.rename(folder)


def find_needed(libraries: Sequence[Path]) -> set[str]:
    """Return the names of the CUDA libraries that these libraries need and torch does not have."""
    own_names = {path.name for path in libraries}
    output = "".join(run("readelf", "-d", path) for path in libraries)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", output))
    return {name for name in needed - own_names if CUDA_LIBRARY.match(name)}


if __name__ == "__main__":
    installed = install()
    print(installed.python)
    print(installed.libraries)
