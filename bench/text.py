"""Texts of the command line: sizes, durations, link speeds and lists, and errors of the user.

Functions named parse convert a text that the user typed, and raise ``UserError`` if it is not
valid. Functions named format convert a value to a text for people.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

_SIZE_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""The number of bytes that each prefix of a size stands for."""
_DURATION_FACTORS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
"""The number of seconds that each unit of a duration stands for."""
_RATE_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
"""The factor that each prefix of a link speed stands for."""


class UserError(ValueError):
    """An error of the user's input or environment, which ends the command with exit code 2.

    The message states the wrong value, the option or file that contains it, and the allowed values.
    The attribute ``hint`` is advice for the user: the command or the text to type instead. It is
    empty if there is no advice.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        """Make an error with a message and a hint: the command or the text to type instead."""
        super().__init__(message)
        self.hint = hint


def format_error(message: str, hint: str = "") -> str:
    """Return the lines ``error: MESSAGE`` and, if ``hint`` is not empty, ``hint: HINT``.

    ``hint`` is advice for the user: the command or the text to type instead. Control characters
    other than newlines are escaped.
    """
    lines = [f"error: {message}"]
    if hint:
        lines.append(f"hint: {hint}")
    return escape_unprintable("\n".join(lines), "\n")


def escape_unprintable(text: str, allowed: str = "") -> str:
    """Return the text with each unprintable character replaced by an escape such as ``\\x1b``.

    Characters in ``allowed`` stay as they are.
    """
    return "".join(
        char if char.isprintable() or char in allowed else f"\\x{ord(char):02x}" for char in text
    )


def suggest_similar(name: str, choices: Iterable[str]) -> str:
    """Return the text ``; did you mean 'x'?``, where x is the choice most similar to ``name``.

    The text is empty if no choice is similar.
    """
    similar = difflib.get_close_matches(name, list(choices), n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def format_list(items: Iterable[object], conjunction: str = "or") -> str:
    """Return the items as text, such as ``a, b or c``, with ``conjunction`` before the last one."""
    *texts, final_text = [str(item) for item in items]
    return f"{', '.join(texts)} {conjunction} {final_text}" if texts else final_text


def name_first(items: Sequence[str], max_items: int) -> list[str]:
    """Return the first ``max_items`` items, followed by a text such as ``and 3 more``.

    If there are at most ``max_items`` items, the result is all items without such a text.
    """
    num_more = len(items) - max_items
    return [*items[:max_items], f"and {num_more} more"] if num_more > 0 else list(items)


def strip_domain(host: str) -> str:
    """Return the part of a host name before its first dot: ``n1`` for ``n1.example.org``.

    Slurm names nodes by this part.
    """
    return host.partition(".")[0]


def pluralize(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural: ``1 case`` or ``2 cases``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"


def get_last_line(output: str) -> str:
    """Return the last line of a program's output that is not blank and not advice on an error.

    Advice is a line that begins with ``hint:`` and follows an error of parbench. Blanks around the
    line are removed. The result is empty if there is no other line.
    """
    for line in reversed(output.splitlines()):
        if line.strip() and not line.startswith("hint: "):
            return line.strip()
    return ""


def parse_size(text: str) -> int:
    """Return the number of bytes in a text such as ``64K`` or ``1GiB``.

    The text is a whole number, optionally with K, M, G or T, which are powers of 1024.
    """
    match = re.fullmatch(r"(\d{1,18})([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        hint = "write a whole number of bytes with K, M, G or T (1024-based), such as 64K"
        raise UserError(f"invalid size {text!r}", hint=hint)
    return int(match[1]) * _SIZE_FACTORS[match[2].upper()]


def format_size(num_bytes: int) -> str:
    """Return a number of bytes as text in the largest unit that is exact: ``64K`` for 65536.

    The units are K, M, G and T, which are powers of 1024. Without an exact unit, the text is the
    number of bytes.
    """
    for unit in "TGMK":
        factor = _SIZE_FACTORS[unit]
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the distinct numbers of bytes in a list of sizes and ranges, in the order of the list.

    An example is ``1K:64M:x4,3M``: the sizes from 1 KiB to 64 MiB, each 4 times as large as the one
    before, and then 3 MiB. Raises ``UserError`` if the list is not valid.
    """
    sizes = [size for part in text.split(",") for size in _parse_range(part)]
    return tuple(dict.fromkeys(sizes))


def _parse_range(text: str) -> list[int]:
    """Return the numbers of bytes in a size or range of sizes, in ascending order.

    A range is ``FIRST:LAST`` or ``FIRST:LAST:xFACTOR``. Each size is the previous one times FACTOR,
    which is 2 by default. Sizes may have K, M, G or T (powers of 1024).
    """
    if ":" not in text:
        return [parse_size(text)]
    start, _, remainder = text.partition(":")
    stop, _, step = remainder.partition(":")
    smallest, largest = parse_size(start), parse_size(stop)
    factor = parse_size(step.removeprefix("x") or "2")
    if not 0 < smallest <= largest or factor < 2:
        allowed = "FIRST:LAST:xFACTOR with 0 < FIRST <= LAST and FACTOR >= 2"
        hint = "write 1K,3M or a range such as 1K:64M:x4 (times 4)"
        raise UserError(f"sizes {text!r} is not a range {allowed}", hint=hint)
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def parse_duration(text: str | float) -> float:
    """Return the seconds in a text such as ``90``, ``2m`` or ``500ms``.

    A number without a unit is in seconds. Raises ``UserError`` if the text is not a number with the
    unit ms, s, m or h, or if the duration is 0.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)(ms|s|m|h|)", str(text).strip(), re.ASCII)
    seconds = float(match[1]) * _DURATION_FACTORS[match[2]] if match else 0.0
    if seconds <= 0:
        hint = "write seconds, or a number with ms, s, m or h, above 0: 90, 90s or 2m"
        raise UserError(f"invalid duration {text!r}", hint=hint)
    return seconds


def format_duration(seconds: float) -> str:
    """Return a number of seconds as text: ``850 ms``, ``42 s`` or ``3 min 20 s``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder} s" if minutes else f"{remainder} s"


def parse_link(text: str) -> float:
    """Return the speed of a link in bytes per second, from a text such as ``400Gbit``.

    Both the text and the result are the speed in one direction. Prefixes such as G are powers of
    1000.
    """
    pattern = r"(\d{1,9}(?:\.\d{1,9})?)\s?([kKmMgGtT]?)(bit(?:/s)?|bps|B/s)"
    match = re.fullmatch(pattern, text.strip(), re.ASCII)
    if match is None or float(match[1]) == 0:
        hint = "write a number above 0 with its unit, such as 400Gbit or 50GB/s (1e9-based)"
        raise UserError(f"invalid link speed {text!r}", hint=hint)
    rate = float(match[1]) * _RATE_FACTORS[match[2].upper()]
    return rate if match[3] == "B/s" else rate / 8


def format_table(rows: Iterable[Sequence[str]], right_aligned: Collection[int] = ()) -> str:
    """Return rows of cells as lines of text whose columns are aligned.

    ``right_aligned`` holds the indices of the columns that are aligned to the right. All rows have
    the same length.
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = []
        for column, width in enumerate(widths):
            cell = row[column]
            cells.append(cell.rjust(width) if column in right_aligned else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
