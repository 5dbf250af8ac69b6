"""Words of the command line: sizes, durations, link speeds, names, and the user's error."""

import difflib
import errno
import itertools
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_SIZE_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZES_HELP = "write 1K,3M or a range such as 1K:64M:x4 (times 4) or 1M:8M:+1M (plus 1M)"
_MAX_SIZES = 10_000
_MOST_HOURS = 500  # what waits in milliseconds of 32 bits waits no longer
_LINK = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?([kKmMgGtT]?)([Bb]it(?:/s)?|bps|b/s|Bps|B/s)", re.ASCII)
_LINK_HELP = "write a number above 0 with its unit, 1e9-based, such as 400Gbit, 200Gbps, 100mbit or 50GB/s"


class UserError(ValueError):
    """One sentence naming what was found, where, and what is allowed; the command line exits with 2."""


def printable(text: str, kept: str = "") -> str:
    """Return text with what a terminal would obey or XML refuse written out, but for what is ``kept``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in kept else f"\\x{ord(char):02x}" for char in text)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` where a choice is close to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(choices: Iterable[object], last: str = "or") -> str:
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def one_of(choices: Iterable[str], given: str) -> str:
    """Return ``a, b or c``, and the one that is close to what was given."""
    words = list(choices)
    return f"{listed(words)}{did_you_mean(given, words)}"


def short_host(name: str) -> str:
    """Return a host's name without its domain, as Slurm names nodes."""
    return name.partition(".")[0]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def last_line(told: str) -> str:
    """Return the last line that is not blank, in which programs say what went wrong; empty if there is none."""
    return told.strip().rpartition("\n")[2].strip()


@contextmanager
def reading(where: object, otherwise: str = "is not what parbench wrote") -> Iterator[None]:
    """Make a ``UserError`` of what goes wrong in reading: ``where`` cannot be read, or is ``otherwise``."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, zlib.error) as error:  # what msgspec raises is a ValueError
        raise UserError(f"{where} {otherwise}: {error}") from error


@contextmanager
def writing(where: object, otherwise: str = "cannot be written") -> Iterator[None]:
    """Make a ``UserError`` of what the system refuses in writing."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{where} {otherwise}: {error.strerror}") from error


@contextmanager
def storing(refusal: str, room: str = "") -> Iterator[None]:
    """Make a ``UserError`` of what the system refuses where results are to go, with the way out."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = f"the disk is full{room}; free some, or" if is_full else f"{error.strerror} ({error.filename});"
        raise UserError(f"{refusal}: {why} choose another folder with --out") from error


def replace_file(target: Path, content: bytes) -> None:
    """Write a file whole or not at all, on disk before this returns; ``OSError`` if the system refuses it."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fresh.unlink(missing_ok=True)  # another's link is not followed
        with fresh.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def write_whole(target: Path, content: bytes) -> None:
    """Write a file whole or not at all; ``UserError`` if the system refuses it."""
    with writing(target):
        replace_file(target, content)


def parse_size(text: str) -> int:
    """Return the bytes meant by ``text``: a whole number with an optional K, M, G or T."""
    match = re.fullmatch(r"(\d{1,18})([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        how = "write a whole number of bytes with K, M, G or T (1024-based), such as 64K"
        raise UserError(f"size {text!r} is not understood: {how}")
    return int(match[1]) * _SIZE_FACTORS[match[2].upper()]


def format_size(num_bytes: int) -> str:
    """Return ``num_bytes`` in the largest unit that holds it exactly, so that it parses back."""
    unit = next((unit for unit in "TGMK" if num_bytes and num_bytes % _SIZE_FACTORS[unit] == 0), "")
    return f"{num_bytes // _SIZE_FACTORS[unit]}{unit}"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes meant by a list such as ``1K:64M:x4,3M``, in the order written, each once."""
    return tuple(dict.fromkeys(size for part in text.split(",") for size in _parse_range(part)))


def _parse_range(text: str) -> list[int]:
    first, *others = text.split(":")
    if not others:
        return [parse_size(text)]
    if len(others) > 2:
        raise UserError(f"sizes {text!r} are not understood: {_SIZES_HELP}")
    last, step = (*others, "x2")[:2]
    start, stop = parse_size(first), parse_size(last)
    if start > stop:
        raise UserError(f"sizes {text!r} start above their end: {first} > {last}; {_SIZES_HELP}")
    if step[:1] == "+" and (increment := parse_size(step[1:])) > 0:
        if (stop - start) // increment >= _MAX_SIZES:
            raise UserError(f"sizes {text!r} are more than {_MAX_SIZES}: write a larger step")
        return list(range(start, stop + 1, increment))
    if (times := re.fullmatch(r"[xX](\d{1,18})", step, re.ASCII)) and int(times[1]) > 1 and start > 0:
        powers = (start * int(times[1]) ** i for i in itertools.count())
        return list(itertools.takewhile(lambda size: size <= stop, powers))
    what = "neither xFACTOR (above 1, from a start above 0) nor +BYTES (above 0)"
    raise UserError(f"sizes {text!r} have no usable step: {step!r} is {what}; {_SIZES_HELP}")


def parse_duration(text: str) -> float:
    """Return the seconds meant by ``text``: ``90``, ``90s``, ``2m``, ``1h`` or ``500ms``, above zero."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)(ms|s|m|h|)", text.strip(), re.ASCII)
    seconds = float(match[1]) * {"ms": 1e-3, "m": 60.0, "h": 3600.0}.get(match[2], 1.0) if match else 0.0
    if seconds <= 0:
        raise UserError(f"duration {text!r} is not understood: write a number above 0 with ms, s, m or h, such as 90s")
    if seconds > _MOST_HOURS * 3600:
        raise UserError(f"duration {text!r} is more than {_MOST_HOURS}h")
    return seconds


def format_duration(seconds: float) -> str:
    """Return ``seconds`` as a person says them: ``850 ms``, ``42 s``, ``3 min 20 s``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def parse_link(text: str) -> float:
    """Return the bytes per second, one way, of a link such as ``400Gbit``, ``200Gbps``, ``100mbit`` or ``50GB/s``."""
    match = _LINK.fullmatch(text.strip())
    rate = float(match[1]) * {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(match[2].upper(), 1.0) if match else 0.0
    if match is None or rate == 0:
        raise UserError(f"link speed {text!r} is not understood: {_LINK_HELP}")
    if match[3] == "b/s" and match[2].islower():
        raise UserError(f"link speed {text!r} could mean bits or bytes, which differ by eight: {_LINK_HELP}")
    return rate if match[3] in ("B/s", "Bps") else rate / 8


def format_table(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return rows of words as lines with their columns aligned, those of the indices ``right`` to the right."""
    lines = [[*row] for row in rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*lines, fillvalue="")]
    sides = ["><"[i not in right] for i in range(len(widths))]
    padded = (
        [f"{word:{side}{width}}" for word, side, width in zip(line, sides, widths, strict=False)] for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in padded)
