"""Text that a parameter holds itself or names a file of. Pure."""

from pathlib import Path

from bench.errors import UserError


def read_text(name: str, where: str) -> str:
    """Return the text of the file ``name``; ``UserError`` that begins with ``where`` if there is none."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is no text: {error.reason}") from error


def read_rows(text: str) -> str:
    """Return rows between semicolons: those given, or those of the file of this name; empty rows are left out."""
    found = text.replace(";", "\n") if ";" in text else read_text(text, f"file {text}")
    return ";".join(row.strip() for row in found.splitlines() if row.strip())
