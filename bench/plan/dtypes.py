"""The element types a collective can carry, known without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """An element type: its size, and the largest integer up to which every integer is exact in it."""

    itemsize: int
    exact_up_to: int


DTYPES = {
    "float64": Dtype(itemsize=8, exact_up_to=1 << 53),
    "float32": Dtype(itemsize=4, exact_up_to=1 << 24),
    "float16": Dtype(itemsize=2, exact_up_to=1 << 11),
    "bfloat16": Dtype(itemsize=2, exact_up_to=1 << 8),
    "float8_e4m3fn": Dtype(itemsize=1, exact_up_to=1 << 4),
    "float8_e5m2": Dtype(itemsize=1, exact_up_to=1 << 3),
    "int64": Dtype(itemsize=8, exact_up_to=(1 << 63) - 1),
    "int32": Dtype(itemsize=4, exact_up_to=(1 << 31) - 1),
    "int8": Dtype(itemsize=1, exact_up_to=(1 << 7) - 1),
    "uint8": Dtype(itemsize=1, exact_up_to=(1 << 8) - 1),
    "bool": Dtype(itemsize=1, exact_up_to=1),
}

# gloo answers float8 with "Invalid scalar type" (torch 2.13).
UNSUPPORTED = {"gloo": frozenset({"float8_e4m3fn", "float8_e5m2"})}


def supports(backend: str, dtype: str) -> bool:
    """Say whether ``backend`` can carry ``dtype``."""
    return dtype not in UNSUPPORTED.get(backend, frozenset())
