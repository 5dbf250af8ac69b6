"""Files from elsewhere, read through one door: what they may cost is bounded, and what is wrong is one sentence.

Nothing that is read decides where something is written: names of files are made by ``file_name``.
"""

import hashlib
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args, get_type_hints

from parbench.bench.text import UserError, format_size, one_of, reading

_T = TypeVar("_T")
MOST_BYTES, MOST_LINE_BYTES, MOST_DEPTH = 64 << 20, 16 << 20, 48
"""What a file may hold that is read as a whole, a line of one that is read in lines, and brackets within brackets."""
_ONE_KIND = bytes.maketrans(b"{}", b"[]")  # or a round would take off one in the other
_NOT_BRACKETS = bytes(set(range(256)) - set(b'[]{}"\\'))
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def file_name(text: str) -> str:
    """Return ``text`` where it is plain enough for a file's name, else a hash of it: it cannot lead elsewhere."""
    return text if _PLAIN.fullmatch(text) else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; ``OSError`` if the system refuses it, ``UserError`` if it is none.

    A pipe, a socket or a device is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is no regular file")
        yield file


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return what is in a file; ``OSError`` if the system refuses it, ``UserError`` if it is no file or too large."""
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} holds more than {format_size(most)} bytes")
    return content


def read_lines(path: Path, most: int = MOST_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each whole line; a last one without a newline was cut short, and is passed over."""
    with open_file(path) as file:
        for number in range(1, 1 << 62):
            line = file.readline(most)
            if line.endswith(b"\n"):
                yield number, line
            elif len(line) == most:
                raise UserError(f"{path}, line {number}: longer than {format_size(most)} bytes")
            else:
                return


def inflate(content: bytes, where: object, *, most: int = MOST_BYTES, wbits: int = 15) -> bytes:
    """Return what zlib compressed, or gzip with 31 ``wbits``; ``zlib.error`` if damaged, ``UserError`` if too large."""
    unzip = zlib.decompressobj(wbits=wbits)
    found = unzip.decompress(content, most + 1)
    if len(found) > most:
        raise UserError(f"{where} holds more than {format_size(most)} bytes once it is decompressed")
    if not unzip.eof:
        raise zlib.error("it ends early")
    return found


def decode_json(content: bytes, kind: type[_T]) -> _T:
    """Return JSON as a type; ``ValueError`` if it is none, nested too deeply or does not fit."""
    import msgspec  # parbench --help does without

    if is_deep(content):
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    return msgspec.json.decode(content, type=kind)


def encode_json(value: object) -> bytes:
    """Return a value as JSON that people can read, a line for each of its parts."""
    import msgspec  # parbench --help does without

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def is_deep(content: bytes) -> bool:
    """Say whether JSON nests too deeply: of its brackets alone, each round takes off the innermost.

    A text without brackets is two quotes beside each other; what leaves a quote or has an escape is counted one by one.
    """
    left = content.translate(_ONE_KIND, _NOT_BRACKETS).replace(b'""', b"")
    if b'"' not in left and b"\\" not in left:
        for _ in range(MOST_DEPTH):
            if not left:
                return False
            left = left.replace(b"[]", b"")
        return b"[]" in left or left.count(b"[") > MOST_DEPTH
    return _counted_depth(content) > MOST_DEPTH


def _counted_depth(content: bytes) -> int:
    depth = most = 0
    for token in re.finditer(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', content, re.DOTALL):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        most = max(most, depth)
    return most


def read_text(name: str, where: str) -> str:
    """Return the text of the file ``name``; ``UserError`` that begins with ``where`` if there is none."""
    with reading(where, "is no text"):
        return read_file(Path(name)).decode().replace("\r\n", "\n")


def read_toml(path: Path, what: str, kind: type[_T], **absent: object) -> _T:
    """Return a file as a struct, ``absent`` where it says nothing; ``UserError`` names the place that is wrong."""
    import tomllib  # parbench --help does without both

    import msgspec

    with reading(f"{what} {path}", "is no TOML"):
        content = read_file(path).decode()
        if is_deep(content.encode()):
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
        found = tomllib.loads(content)
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
