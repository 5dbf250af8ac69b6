"""Reading and atomic writing of files, with errors of both as one message to the user."""

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from parbench.bench.text import UserError

# msgspec and tomllib are imported where they are needed, so that `parbench --help` starts faster.

_T = TypeVar("_T")


@contextmanager
def convert_read_errors(
    source: object,
    problem: str = "is damaged or was not written by parbench",
) -> Iterator[None]:
    """Convert errors of reading within the ``with`` statement to a ``UserError``.

    - ``OSError``: the message is ``SOURCE cannot be read: REASON`` with the reason of the system.
    - ``ValueError``, ``RecursionError`` and ``zlib.error``: the message is ``SOURCE PROBLEM:
      ERROR``.
    - Other errors and a ``UserError`` are not converted.

    ``source`` is the file or another source, whose text is SOURCE. ``problem`` is the clause
    PROBLEM about bad content.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, zlib.error) as error:  # Errors of msgspec are ValueErrors.
        raise UserError(f"{source} {problem}: {error}") from error


@contextmanager
def convert_write_errors(target: object, problem: str = "cannot be written") -> Iterator[None]:
    """Convert an ``OSError`` within the ``with`` statement to a ``UserError``.

    The message is ``TARGET PROBLEM: REASON``: the file or folder ``target``, the clause
    ``problem``, and the reason of the system.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{target} {problem}: {error.strerror}") from error


def replace_file(target: Path, content: bytes) -> None:
    """Write a file atomically. The content is on disk when this function returns.

    An old file is replaced. Raises ``OSError`` if the file cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_output(target: Path, content: bytes) -> None:
    """Write a file atomically. Raises ``UserError`` if it cannot be written."""
    with convert_write_errors(target):
        replace_file(target, content)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line of a file, with its newline.

    A last line without a newline was cut short and is left out.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def decode_json(content: bytes, kind: type[_T]) -> _T:
    """Return the value of type ``kind`` that the JSON text ``content`` represents.

    Raises ``ValueError`` or ``RecursionError`` if the text is not JSON or does not match the type.
    """
    import msgspec

    return msgspec.json.decode(content, type=kind)


def encode_json(value: object) -> bytes:
    """Return a value as JSON with an indentation of one space, and a final newline."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def read_toml(path: Path, description: str, kind: type[_T], **defaults: object) -> _T:
    """Return the content of a TOML file as a struct of type ``kind``.

    Raises ``UserError`` if the file is not valid.

    Args:
        path: the file.
        description: the words before the path in error messages.
        kind: the type of the struct.
        defaults: the values of the struct's fields that the file lacks, by field name.
    """
    import tomllib

    import msgspec

    with convert_read_errors(f"{description} {path}", "is not TOML"):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        return msgspec.convert({**defaults, **content}, kind)
    except msgspec.ValidationError as error:
        hint = _list_allowed(str(error), kind)
        raise UserError(f"{description} {path}: {error}", hint=hint) from error


def _list_allowed(message: str, kind: Any) -> str:
    """Return advice on an unknown key or a bad choice in a file, empty for other errors.

    ``message`` is the error of msgspec, which ends with the place, such as ``$.mode``. ``kind`` is
    the type of the file's content.
    """
    _, _, place = message.partition(" - at `$.")
    for key in place.rstrip("`").split("."):
        name, bracket, _ = key.partition("[")
        kind = get_type_hints(kind).get(name, object) if name else kind
        if bracket:  # the elements of a list: case[0]
            kind = (*get_args(kind), object)[0]
    choices: list[str] = []
    if "enum value" in message:
        choices = re.findall(r"'([\w-]+)'", str(kind))
    elif "unknown field" in message:
        choices = getattr(kind, "__struct_fields__", [])
    return f"allowed are {', '.join(dict.fromkeys(choices))}" if choices else ""
