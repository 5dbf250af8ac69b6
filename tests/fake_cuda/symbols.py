"""Generate the functions that torch imports from CUDA's libraries and the stub lacks.

A generated function is one of three: it succeeds and does nothing, it launches a kernel as cuBLAS
does, or it fails, and the trace contains its name.
"""

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

CUDA_FUNCTION = re.compile(
    r"_*cuda[A-Z]|cu[A-Z]|nccl|cublas|cudnn|cusparse|cufft|curand|cusolver|cufile|cupti"
    r"|nvrtc|nvJitLink|nvshmem|nvtx"
)
BLAS_LAUNCH = re.compile(r"cublas(?!Lt)(?!Set|Get|Create|Destroy)")

SUCCEEDING = {
    "__cudaRegisterFatBinaryEnd",
    "__cudaRegisterVar",
    "__cudaUnregisterFatBinary",
    "cublasLtDestroy",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoConfigGetAttribute",
    "cublasLtMatmulAlgoConfigSetAttribute",
    "cublasLtMatmulAlgoInit",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
    "cublasSetMathMode",
    "cublasSetPointerMode_v2",
    "cublasSetSmCountTarget",
    "cublasSetWorkspace_v2",
    "cudaDeviceEnablePeerAccess",
    "cudaFuncSetAttribute",
    "cudaGraphDestroy",
    "cudaGraphExecDestroy",
    "ncclCommFinalize",
    "ncclRedOpDestroy",
}
"""Functions without an effect that the stub could show."""

ERROR_CODES = {"cuda": 801, "nccl": 5, "cublas": 15, "cu": 801}
"""The code for "not supported" by the first letters of a name, the longest that fit."""


def list_symbols(paths: Iterable[Path], *options: str) -> set[str]:
    """Return the names that ``nm`` prints for libraries or objects, without versions."""
    command = ["nm", "--format=posix", *options, *map(str, paths)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in output.splitlines())
    return {row[0].partition("@")[0] for row in rows if len(row) > 1}


def error_code(name: str) -> int:
    prefixes = [prefix for prefix in ERROR_CODES if name.startswith(prefix)]
    return ERROR_CODES[max(prefixes, key=len)] if prefixes else 1


def function_text(name: str) -> str:
    """Return the definition in C of a function that is not written by hand."""
    if name in SUCCEEDING:
        return f"int {name}(void) {{ return 0; }}"
    if BLAS_LAUNCH.match(name):
        return f'int {name}(void *handle) {{ return launch_blas(handle, "{name}"); }}'
    return f'int {name}(void) {{ return refuse("{name}", {error_code(name)}); }}'


def write_generated(target: Path, libraries: Sequence[Path], objects: Sequence[Path]) -> None:
    """Write functions for symbols that torch's libraries import and the objects do not define."""
    imported = list_symbols(libraries, "-D", "--undefined-only")
    defined = list_symbols(libraries, "-D", "--defined-only")
    defined |= list_symbols(objects, "--defined-only")
    missing = [name for name in imported - defined if CUDA_FUNCTION.match(name)]
    lines = [
        "int launch_blas(void *handle, const char *name);",
        "int refuse(const char *name, int code);",
        *map(function_text, sorted(missing)),
    ]
    target.write_text("\n".join(lines) + "\n")
