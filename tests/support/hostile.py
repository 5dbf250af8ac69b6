"""Folders as nobody wrote them: real runs, sweeps and histories with values, bytes and files that break readers."""

import contextlib
import gzip
import io
import json
import os
import random
import socket
import sqlite3
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ESCAPES = ("../../canary/evil", "../evil", "..", ".", "", "/", "a/b", "\x00", "evil\x00", "x" * 300, "a\nb", "\x1b[31m")
_NUMBERS = (0, -1, 1, 2, 3, 7, 1000, 10**6, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), 10**30)
_FLOATS = (0.0, -0.0, 5e-324, 1e-300, 1e-30, 1e30, 1e154, 1e300, 1.7e308, -1.7e308, -1e-9, 0.5)
_WORDS = (
    "nan",
    "inf",
    "yesterday",
    "ok",
    "wrong",
    "hang",
    "skipped",
    "float32",
    "blocking",
    "1F1B",
    "0",
    "-1",
    "é" * 50,
)
_RAW = ("1e999", "-1e999", "NaN", "Infinity", "01", '"\\ud800"', "1" * 400, "0." + "1" * 400, "tru", "{", '"')
_MARK = "\ue000raw"


BOMBS = ((b" \n", 1 << 30), (b"[", 1 << 24), (b"0", 1 << 30), (b'{"a":', 1 << 24))


def nested(depth: int, kind: str = "mixed") -> str:
    left, right = {"list": ("[", "]"), "dict": ('{"a":', "}"), "mixed": ('[{"a":', "}]")}[kind]
    return left * depth + "0" + right * depth


def hostile_value(draw: random.Random) -> Any:
    """Return a value that a field may not expect; text that begins with a mark stands in JSON as it is."""
    kind = draw.randrange(13)
    if kind < 3:
        return draw.choice(_NUMBERS)
    if kind < 5:
        return draw.choice(_FLOATS)
    if kind == 5:
        return draw.choice(_WORDS)
    if kind == 6:
        return draw.choice(ESCAPES)
    if kind == 7:
        return draw.choice(([], {}, None, True, False, [[]], {"": None}, [None], {"a": {}}))
    if kind == 8:
        return _MARK + draw.choice(_RAW)
    if kind == 9:
        return _MARK + nested(draw.choice((3, 40, 500, 5_000, 100_000)), draw.choice(("list", "dict", "mixed")))
    if kind == 10:
        return draw.choice(("x" * 100_000, ["note"] * 200_000, list(range(50_000)), {str(i): i for i in range(20_000)}))
    if kind == 11:
        return [draw.choice(_FLOATS) for _ in range(draw.randrange(5))]
    return [[draw.choice(_NUMBERS)], [draw.choice(_FLOATS), None]]


def dumped(value: Any, between: str = ": ") -> bytes:
    """Return JSON, what is marked as it is; with " = " ``between`` name and value it is a value of TOML."""
    found: dict[str, str] = {}

    def held(one: Any) -> Any:
        if isinstance(one, str) and one.startswith(_MARK):
            found[key := f"{_MARK}{len(found)};"] = one[len(_MARK) :]
            return key
        if isinstance(one, dict):
            return {name: held(each) for name, each in one.items()}
        return [held(each) for each in one] if isinstance(one, list) else one

    text = json.dumps(held(value), ensure_ascii=False, separators=(", ", between))
    for key, raw in found.items():
        text = text.replace(f'"{key}"', raw)
    return text.encode(errors="surrogatepass")


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if len(path) == 50:  # to list the places of what is nested 5,000 deep takes minutes
        return [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, one in inner for place in _places(one, (*path, key))]


def mutate(value: Any, draw: random.Random, others: Sequence[Any] = ()) -> None:
    """Change one place of a JSON value; shallow places come as often as deep ones."""
    places = _places(value)
    if not places:
        return
    depth = draw.choice(sorted({len(place) for place in places}))
    [*way, last] = draw.choice([place for place in places if len(place) == depth])
    inside = value
    for key in way:
        inside = inside[key]
    kind = draw.randrange(10)
    if kind == 0:
        del inside[last]
    elif kind == 1 and isinstance(inside, dict):
        inside[str(hostile_value(draw))[:200]] = inside.pop(last)
    elif kind == 2 and isinstance(inside, list):
        inside.extend(inside[last : last + 1] * draw.choice((1, 2, 1000)))
    else:
        other = _elsewhere(draw.choice(others), last, draw) if kind == 3 and others else None
        inside[last] = _near(inside[last], kind, draw) if other is None else other


def _near(one: Any, kind: int, draw: random.Random) -> Any:
    """Return something that looks like what is there, for some kinds of change, else any hostile value."""
    if kind == 4 and isinstance(one, str):
        return draw.choice((one * 2, one[:-1], f"../{one}", one.upper()))
    if kind == 5 and isinstance(one, int | float):
        return draw.choice((-one, one * 1000, one * 1e12, one / 3, 0))
    if kind == 6 and isinstance(one, list | dict):
        return draw.choice(([], {}, None))
    return hostile_value(draw)


def _elsewhere(other: Any, name: Any, draw: random.Random) -> Any:
    """Return what another value has by the same name, None if it has none."""
    found = [place for place in _places(other) if place[-1] == name]
    for key in draw.choice(found) if found else ():
        other = other[key]
    return other if found else None


def _of_lines(content: bytes, draw: random.Random) -> bytes:
    lines = [json.loads(line) for line in content.splitlines()]
    whole = [json.loads(line) for line in content.splitlines()]
    many = draw.random() < 0.3  # the same change in all lines is what an analysis comes to see
    seed = draw.randrange(1 << 30)
    for _ in range(draw.choice((1, 1, 2, 4))):
        if many and lines and draw.random() < 0.5:
            _everywhere(lines, draw)
        elif many:
            for line in lines:
                mutate(line, random.Random(seed), whole)
        elif lines:
            mutate(draw.choice(lines), draw, whole)
    if draw.random() < 0.1:
        lines += [draw.choice(whole)] * draw.choice((1, 50))
    return b"".join(dumped(line) + b"\n" for line in lines)


def _everywhere(lines: Sequence[Any], draw: random.Random) -> None:
    """Give all lines the same value at one place, of a parameter as often as of anything else, or take it away."""
    places = [place for place in _places(draw.choice(lines)) if place]
    params = [place for place in places if place[:-1] in (("case", "params"), ("case", "defaults"))]
    [*way, last] = draw.choice(params if params and draw.random() < 0.5 else places or [("",)])
    value, takes = hostile_value(draw), draw.random() < 0.2
    for inside in lines:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for key in way:
                inside = inside[key]
            inside[last]
            if takes:
                del inside[last]
            else:
                inside[last] = value


def _of_json(content: bytes, draw: random.Random) -> bytes:
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        mutate(value, draw)
    return dumped(value)


def _of_bytes(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    kind = draw.randrange(8)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 100)))) + content[at + 1 :]
    if kind == 2:
        return content[:at] + b"\xff\xfe\x80" + content[at:]
    if kind == 3:
        return b"\xef\xbb\xbf" + content
    if kind == 4:
        return content.replace(b"\n", b"\r\n")
    if kind == 5:
        return draw.choice((b"", b"\n", b"\n\n\n", b"null\n", b"[]", b"{}\n", b"0", b"\x00" * 5000, b"{" * 200_000))
    if kind == 6:
        return content[at:] + content[:at]
    return content * draw.choice((2, 20))


def _of_gzip(content: bytes, draw: random.Random) -> bytes:
    kind = draw.randrange(6)
    if kind == 0:
        return _of_bytes(content, draw)
    if kind == 1:
        return bomb(*draw.choice(BOMBS))
    if kind == 2:
        return gzip.compress(nested(100_000).encode())
    if kind == 3:
        return gzip.decompress(content)
    return gzip.compress(_of_json(gzip.decompress(content), draw))


def bomb(piece: bytes, size: int, wbits: int = 31) -> bytes:
    """Return ``size`` bytes of one piece, compressed; GiB are a MB. The checksum at its end is missing."""
    squeeze, block = zlib.compressobj(9, wbits=wbits), piece * (1 << 20)
    head = squeeze.compress(b"") + squeeze.flush(zlib.Z_FULL_FLUSH)
    once = squeeze.compress(block) + squeeze.flush(zlib.Z_FULL_FLUSH)
    return head + once * max(1, size // len(block))


def npz(arrays: dict[str, Any], compressed: bool = True) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def samples(ranks: int = 2, columns: int = 6) -> dict[str, Any]:
    """Return a record's arrays as ranks write them."""
    start = 1_000_000 * np.arange(ranks * columns, dtype=np.int64).reshape(ranks, columns)
    told = {"arrival_ns": start, "exit_ns": start + 900, "duration_ns": start * 0 + 900, "issue_ns": start * 0}
    return {"ranks": np.arange(ranks, dtype=np.int64), **told, "steps_per_sample": np.int64(1)}


def _of_npz(content: bytes, draw: random.Random) -> bytes:
    arrays = samples(draw.choice((1, 2, 3)))
    name, kind = draw.choice(sorted(arrays)), draw.randrange(16)
    one = np.asarray(arrays[name])
    wrong: dict[int, Callable[[], Any]] = {
        0: lambda: one.astype(complex),
        1: lambda: one.astype(str),
        2: lambda: one.astype(bool),
        3: lambda: np.full(one.shape, np.nan),
        4: lambda: one.ravel()[:0],
        5: lambda: np.float64(3),
        6: lambda: one.reshape(1, *one.shape),
        7: lambda: one.astype(np.uint64) + np.uint64(2**63),
        8: lambda: -one - 2**62,
        9: lambda: np.zeros(1 << 20, np.int64),
        10: lambda: np.zeros((1, 1 << 27), np.int8),
    }
    if kind in wrong:
        return npz({**arrays, name: wrong[kind]()})
    if kind == 11:
        buffer = io.BytesIO()
        np.save(buffer, one)
        return buffer.getvalue()
    if kind == 12:
        return _of_bytes(npz(arrays), draw)
    head = b"\x93NUMPY\x01\x00"
    told = f"{{'descr': '{draw.choice(('<i8', '|O', '<f16', 'x'))}', 'fortran_order': False, "
    shape = draw.choice(("(2, 1000000000000)", "(4611686018427387904, 4)", "(-1, 2)", "(2, 6)", "'a'", "(" * 300))
    text = f"{told}'shape': {shape}}}\n".encode()
    member = head + len(text).to_bytes(2, "little") + text
    buffer, method = io.BytesIO(), draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(buffer, "w", method) as file:
        for other in arrays:
            bad = other == name
            file.writestr(f"{other}.npy", (member if kind != 15 else b"junk") if bad else _npy(arrays[other]))
        if kind == 13:
            file.writestr("more.npy", bytes(1 << 28))
    found = buffer.getvalue()
    if kind == 14:  # encrypted, by its flag
        at = found.rfind(b"PK\x01\x02") + 8
        found = found[:at] + bytes([found[at] | 1]) + found[at + 1 :]
    return found


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _of_toml(content: bytes, draw: random.Random) -> bytes:
    value = tomllib.loads(content.decode())
    mutate(value, draw)
    return toml(value)


def toml(value: Mapping[str, Any]) -> bytes:
    return b"".join(b"%s = %s\n" % (dumped(name), dumped(one, " = ")) for name, one in value.items())


def spoil_place(path: Path, draw: random.Random) -> str:
    """Put what is no regular file in the place of one, or one that never ends; return its name."""
    kinds = ("fifo", "socket", "folder", "/dev/zero", "/dev/full", "loop", "dangling", "missing", "sparse", "linked")
    kind = draw.choice(kinds)
    content = path.read_bytes() if path.is_file() else b""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's path is short
            one.bind(path.name)
            os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    elif kind.startswith("/dev"):
        path.symlink_to(kind)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("/nonexistent/file")
    elif kind == "linked":
        other = path.with_name(f"{path.name}.other")
        other.write_bytes(content)
        path.symlink_to(other.name)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.write(content)
            file.truncate(1 << 40)
    return kind


_BY_ENDING = {
    ".jsonl": _of_lines,
    ".json": _of_json,
    ".gz": _of_gzip,
    ".npz": _of_npz,
    ".toml": _of_toml,
}


def spoil_file(path: Path, draw: random.Random) -> str:
    """Spoil one file of a folder, mostly by its structure; return what was done."""
    kind = draw.random()
    if kind < 0.08:
        return f"{path.name}: {spoil_place(path, draw)}"
    content = path.read_bytes()
    by_structure = _BY_ENDING.get(path.suffix, _of_bytes)
    way = by_structure if kind < 0.85 else _of_bytes
    try:
        found = way(content, draw)
    except (ValueError, RecursionError, OSError, EOFError, zlib.error):  # what was spoilt before has no structure
        way, found = _of_bytes, _of_bytes(content, draw)
    path.write_bytes(found)
    return f"{path.name}: {way.__name__[4:]}"


_WEIGHTS = {".jsonl": 10, "run.json": 4, ".gz": 3, ".npz": 3, "plan.json": 2, "sweep.json": 8}


def spoil_folder(folder: Path, draw: random.Random) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    by_kind: dict[str, list[Path]] = {}
    for path in files:  # one folder has many samples, and one file of records
        by_kind.setdefault(path.name if path.suffix == ".json" else path.suffix, []).append(path)
    kinds, told = sorted(by_kind), list[str]()
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        [kind] = draw.choices(kinds, [_WEIGHTS.get(kind, 1) for kind in kinds])
        path = draw.choice(by_kind[kind])
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26:
            told.append(spoil_file(path, draw))
    return told


_CELLS = (
    0,
    -1,
    2**62,
    -(2**63),
    1e308,
    -1e308,
    5e-324,
    float("inf"),
    None,
    "",
    "inf",
    "yesterday",
    "{}",
    "[]",
    b"",
    b"\xff\x00",
)


def spoil_history(file: Path, draw: random.Random) -> str:
    """Spoil a history's cells, tables or bytes; return what was done."""
    kind = draw.randrange(12)
    if kind == 0:
        file.write_bytes(_of_bytes(file.read_bytes(), draw))
        return "bytes"
    if kind == 1:
        return spoil_place(file, draw)
    with contextlib.closing(sqlite3.connect(file)) as base, base:
        table = draw.choice([name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")])
        columns = [row[1] for row in base.execute(f"PRAGMA table_info({table})")]
        if kind == 2:
            endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT "
            base.execute(f"DROP TABLE {table}")
            base.execute(f"CREATE VIEW {table} AS {endless}{', '.join(f'x AS {name}' for name in columns)} FROM n")
        elif kind == 3:
            number = draw.choice((0, 2, -1, 2**31 - 1))
            base.execute(f"PRAGMA {draw.choice(('user_version', 'application_id'))} = {number}")
        elif kind == 4:
            base.execute(f"DROP TABLE {table}")
        elif kind == 5:
            base.execute(f"CREATE TRIGGER evil AFTER INSERT ON {table} BEGIN DELETE FROM run; END")
        else:
            _spoil_cells(base, table, columns, draw)
        done = {2: "an endless view", 3: "a pragma", 4: "dropped", 5: "a trigger"}
        return f"{table}: {done.get(kind, 'cells')}"


def _spoil_cells(base: sqlite3.Connection, table: str, columns: Sequence[str], draw: random.Random) -> None:
    base.execute("PRAGMA foreign_keys = OFF")
    if draw.random() < 0.5:  # without its constraints a table takes anything
        base.execute(f"CREATE TABLE free AS SELECT * FROM {table}")
        base.execute(f"DROP TABLE {table}")
        base.execute(f"ALTER TABLE free RENAME TO {table}")
    for _ in range(draw.choice((1, 1, 2, 3))):
        column = draw.choice(columns)
        known = base.execute(f"SELECT {column} FROM {table} LIMIT 1").fetchone()
        cell = _cell(known[0] if known else None, column, draw)
        where = f" WHERE run = {draw.randrange(1, 8)}" if table == "point" else ""
        if not where:
            where = f" WHERE rowid IN (SELECT rowid FROM {table} ORDER BY random() LIMIT 1)"
        try:
            base.execute(f"UPDATE OR REPLACE {table} SET {column} = ?{where if draw.random() < 0.7 else ''}", (cell,))
        except (sqlite3.IntegrityError, OverflowError, sqlite3.OperationalError):
            base.execute(f"DELETE FROM {table}")


def _cell(held: Any, column: str, draw: random.Random) -> Any:
    if isinstance(held, bytes) and draw.random() < 0.9:
        try:
            content = zlib.decompress(held)
            found = (_of_lines if column == "records" else _of_json)(content, draw)
        except (ValueError, RecursionError, zlib.error):
            return held[:-9]
        return draw.choice((zlib.compress(found), zlib.compress(found), held[:-9], bomb(*draw.choice(BOMBS), wbits=15)))
    if isinstance(held, str) and held[:1] in ("{", "[") and draw.random() < 0.8:
        with contextlib.suppress(ValueError, RecursionError):
            return _of_json(held.encode(), draw).decode(errors="replace")
    return draw.choice((*_CELLS, *ESCAPES))
