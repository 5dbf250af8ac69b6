"""The bytes of an element of each kind of model state, as ``--set state=`` names them. Pure."""

from dataclasses import fields, replace

from parbench.bench.text import UserError, format_choices
from parbench.workloads.model.shapes import Widths

STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""The bytes of an element of state."""


def parse_widths(text: str, default: Widths) -> Widths:
    """Return the widths of a text such as ``moments=bfloat16,master=none``.

    Raises ``UserError`` with the allowed names.
    """
    widths: dict[str, int] = {}
    kinds = [field.name for field in fields(Widths)]
    for part in filter(None, text.split(",")):
        kind, _, dtype = part.partition("=")
        if kind not in kinds:
            raise UserError(f"--set state={part}: {kind!r} is not {format_choices(kinds, kind)}")
        dtypes = dict(STATE_DTYPES)
        if kind == "master":
            dtypes["none"] = 0
        if dtype not in dtypes:
            allowed = format_choices(dtypes, dtype)
            raise UserError(f"--set state={part}: {dtype!r} is not {allowed}")
        widths[kind] = dtypes[dtype]
    return replace(default, **widths)


def count_updated_bytes(widths: Widths) -> int:
    """Return the bytes that AdamW moves per parameter.

    It reads and writes both moments and the weight, and reads the gradient. With a master copy it
    also writes the parameter.
    """
    weight = widths.master or widths.parameters
    copy = widths.parameters if widths.master else 0
    return 2 * (2 * widths.moments + weight) + widths.gradients + copy
