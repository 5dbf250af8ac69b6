"""Reading of files and their values; what is wrong with a file is one message."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from parbench.bench.text import UserError, format_size, one_of, reading

_T = TypeVar("_T")
MAX_BYTES = 1 << 30
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def file_name(text: str) -> str:
    """Return ``text`` where it is plain enough for a file's name, otherwise a hash of it."""
    return text if _PLAIN.fullmatch(text) else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


def read_file(path: Path) -> bytes:
    """Return the content of a file; ``OSError`` if the system refuses it, ``UserError`` if it is too large."""
    _check_size(path)
    return path.read_bytes()


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each whole line; a last one without a newline was cut short, and is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise UserError(f"{path} has {format_size(size)} bytes, and at most {format_size(MAX_BYTES)} are read")


def decode_json(content: bytes, kind: type[_T]) -> _T:
    """Return JSON as a type; ``ValueError`` if it does not fit, ``RecursionError`` if it is nested too deeply."""
    import msgspec  # parbench --help does without

    return msgspec.json.decode(content, type=kind)


def encode_json(value: object) -> bytes:
    """Return a value as JSON that people can read, a line for each of its parts."""
    import msgspec  # parbench --help does without

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def read_text(name: str, where: str) -> str:
    """Return the text of the file ``name``; ``UserError`` that begins with ``where`` if there is none."""
    with reading(where, "is no text"):
        return read_file(Path(name)).decode().replace("\r\n", "\n")


def read_toml(path: Path, what: str, kind: type[_T], **absent: object) -> _T:
    """Return a file as a struct, ``absent`` where it says nothing; ``UserError`` names the place that is wrong."""
    import tomllib  # parbench --help does without both

    import msgspec

    with reading(f"{what} {path}", "is no TOML"):
        found = tomllib.loads(read_file(path).decode())
    try:
        return msgspec.convert({**absent, **found}, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{what} {path}: {error}{_allowed(str(error), kind)}") from error


def _allowed(refusal: str, kind: Any) -> str:
    """Return what is allowed where msgspec found an unknown field or word; its sentence ends in the place's path."""
    found = re.search(r"(unknown field `|enum value ')([^`']*)[`']", refusal)
    if found is None:
        return ""
    place, parts = re.search(r" - at `\$([^`]*)`$", refusal), _parts(kind)
    for name in re.findall(r"\.(\w+)", place[1] if place else ""):
        [struct] = [part for part in parts if hasattr(part, "__struct_fields__")]
        parts = _parts(get_type_hints(struct)[name])
    words = [word for part in parts for word in getattr(part, "__struct_fields__", (part,)) if isinstance(word, str)]
    return f"; allowed are {one_of(words, found[2])}"


def _parts(kind: Any) -> list[Any]:
    return list(dict.fromkeys(part for arg in get_args(kind) for part in _parts(arg))) or [kind]


def read_rows(text: str) -> str:
    """Return rows between semicolons: those given, or those of the file of this name; empty rows are left out."""
    found = text.replace(";", "\n") if ";" in text else read_text(text, f"file {text}")
    return ";".join(row.strip() for row in found.splitlines() if row.strip())
