"""Reading of files and their values. A problem of a file is one message."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from parbench.bench.text import UserError, format_size, one_of, reading

_T = TypeVar("_T")
MAX_BYTES = 1 << 30
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_UNKNOWN_WORD = re.compile(r"(?:unknown field `|enum value ')([^`']*)[`']")
_PLACE = re.compile(r" - at `\$([^`]*)`$")


def file_name(text: str) -> str:
    """Return ``text`` if it can be a file's name, otherwise a hash of it."""
    if _PLAIN_NAME.fullmatch(text):
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


def read_file(path: Path) -> bytes:
    """Return the content of a file; ``UserError`` if it is too large."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise UserError(f"{path} has {format_size(size)} bytes, and at most {format_size(MAX_BYTES)} are read")
    return path.read_bytes()


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and bytes of each line.

    A last line without a newline was cut short and is left out.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def decode_json(content: bytes, kind: type[_T]) -> _T:
    """Return JSON as a type; ``ValueError`` or ``RecursionError`` if it does not fit."""
    import msgspec  # `parbench --help` starts faster without it.

    return msgspec.json.decode(content, type=kind)


def encode_json(value: object) -> bytes:
    """Return a value as indented JSON."""
    import msgspec  # `parbench --help` starts faster without it.

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def read_text(name: str, source: str) -> str:
    """Return the text of the file ``name``; ``source`` begins the message of an error."""
    with reading(source, "is not text"):
        return read_file(Path(name)).decode().replace("\r\n", "\n")


def read_toml(path: Path, description: str, kind: type[_T], **defaults: object) -> _T:
    """Return a TOML file as a struct; ``UserError`` names the place that is wrong."""
    import tomllib  # `parbench --help` starts faster without them.

    import msgspec

    with reading(f"{description} {path}", "is not TOML"):
        content = tomllib.loads(read_file(path).decode())
    try:
        return msgspec.convert({**defaults, **content}, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{description} {path}: {error}{_describe_allowed(str(error), kind)}") from error


def _describe_allowed(message: str, kind: Any) -> str:
    """Return what is allowed if msgspec found an unknown field or word.

    Its message ends in the path of the place.
    """
    unknown = _UNKNOWN_WORD.search(message)
    if unknown is None:
        return ""
    types = _member_types(kind)
    place = _PLACE.search(message)
    for field in re.findall(r"\.(\w+)", place[1] if place else ""):
        [struct] = [member for member in types if hasattr(member, "__struct_fields__")]
        types = _member_types(get_type_hints(struct)[field])
    words: list[str] = []
    for member in types:
        words += getattr(member, "__struct_fields__", [member] if isinstance(member, str) else [])
    return f"; allowed are {one_of(words, unknown[1])}"


def _member_types(kind: Any) -> list[Any]:
    """Return the types inside unions, lists and annotations, and the words of a ``Literal``."""
    members = [member for arg in get_args(kind) for member in _member_types(arg)]
    return list(dict.fromkeys(members)) or [kind]


def read_rows(text: str) -> str:
    """Return rows between semicolons, from ``text`` itself or the file of this name.

    Empty rows are left out.
    """
    content = text.replace(";", "\n") if ";" in text else read_text(text, f"file {text}")
    return ";".join(row.strip() for row in content.splitlines() if row.strip())
