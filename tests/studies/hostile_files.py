"""Whether files from elsewhere break what reads them: runs, sweeps, histories, traces, what one asks with, all spoilt.

python tests/studies/hostile_files.py [--folders 5000] [--seed 0] [--commands 6] spoils a copy of real ones per folder,
runs that many of the commands that read it, each in the same forked process, and counts tracebacks, hangs (over 10 s
of the processor's time, or 60 s), memory (over 1 GiB more than imports take) and writes beside what was asked for. It
prints each new kind of finding once with its seed, and a table. Exit code 1 if anything was found.

--only SEED [...] tries these folders again, with all commands and each one's output's end.
"""

import argparse
import contextlib
import io
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import support_path  # noqa: F401 - finds the next
from exchange_fixtures import NCCL, OSU
from history_fixtures import put
from hostile import dumped, npz, samples, spoil_folder, spoil_history, toml
from kineto_files import RankFile
from paths import TESTS
from sweeps import job, make_folder, make_sweep, point

import parbench
from parbench import cli
from parbench.slurm.job.state import SavedState, write_state

# what one asks with: a checkpoint's config.json, and files of one's own
ASKED: dict[str, dict[str, Any]] = {
    "config.json": {
        "model_type": "deepseek_v3",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
        "vocab_size": 1000,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "tie_word_embeddings": False,
    },
    "model.toml": {
        "layers": 4,
        "hidden": 256,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 512,
        "vocabulary": 1000,
        "sequence": 256,
        "mixture": {"experts": 8, "top_k": 2, "expert_ffn": 128, "shared": 1, "dense_layers": 1},
    },
    "hardware.toml": {
        "flops_per_second": 989e12,
        "memory_bytes": 80e9,
        "memory_bytes_per_second": 3e12,
        "gpus_per_node": 4,
        "inside_bytes_per_second": 450e9,
        "across_bytes_per_second": 50e9,
        "rails": 1,
        "launch_seconds": 8e-6,
        "across_hop_seconds": 6e-6,
        "nodes_per_pod": 4,
        "oversubscription": 2.0,
        "efficiency": {"gemm": 0.5, "memory": 0.9, "overlap": {"fsdp": 0.5}},
    },
    "budgets.toml": {
        "collective.all_reduce": {"time": "<10s", "busbw": ">1MB/s"},
        "workload.*": {"exposed_fraction": "<10%"},
    },
    "sweep.toml": {
        "name": "nodes",
        "nodes": [2, 4],
        "ntasks_per_node": 2,
        "placement": ["block", "cyclic"],
        "budget": "15s",
        "case": [{"name": "collective.all_reduce", "set": {"size_bytes": "64K,4M"}}],
        "slurm": {"time": "10m", "requeue": True, "on_dead_node": "go-on"},
    },
}
PRINTED = {"nccl-tests": NCCL, "osu": OSU}
SECONDS, WALL_SECONDS, MEMORY_BYTES, OUTPUT_BYTES = 10.0, 60.0, 1 << 30, 1 << 28
RUNS = TESTS / "golden" / "runs"
EXPORTS = ("nccl-tests", "csv", "chrome-trace", "pytest-benchmark", "bencher")
PACKAGES = ("bench", "reports", "slurm", "workloads")
Words = tuple[str, ...]


class Hung(BaseException):
    """A command took too long; no code of the product catches it."""


@dataclass
class Found:
    """What one folder showed: findings by kind, with the command and where it was."""

    seed: int
    told: str = ""
    commands: int = 0
    findings: list[tuple[str, str, str]] = field(default_factory=list)


def make_originals(folder: Path) -> None:
    """Write what is spoilt: runs with samples, timelines and predictions, two sweeps, a history, a job's traces."""
    for name in ("base", "former", "new", "steps"):
        shutil.copytree(RUNS / name, folder / "run" / name)
        run = folder / "run" / name
        (run / "samples").mkdir()
        lines = (run / "records.jsonl").read_bytes().splitlines(keepends=True)
        kept = lines if name != "steps" else [*lines[:1], *_pairs(lines[0]), *lines[6:]]
        (run / "records.jsonl").write_bytes(b"".join(kept))
        for line in kept:
            record = msgspec.json.decode(line)
            place = f"{record['case']['id']}-{record['launch']}.npz"
            (run / "samples" / place).write_bytes(npz(samples(record["world"]["size"])))
    quietly("plan", "--validate", str(folder / "run" / "steps"))
    points = [point(i, seconds=5.0) for i in range(3)]
    sweep = make_folder(folder, make_sweep(points), job("7", points))
    for one, name in zip(points, ("base", "new"), strict=False):
        run = sweep / "runs" / one.id / f"20260101T00000{len(name)}Z-{name}"
        shutil.copytree(RUNS / name, run)
        where = str(run.relative_to(sweep))
        write_state(sweep, one.id, SavedState(state="done", job="7", time="2026-01-01", run=where, seconds=3.0))
    for i in range(10):
        put(folder / "nights", i, 1.3 if i > 7 else 1.0)
    quietly(
        "history",
        "add",
        str(folder / "nights"),
        *(str(RUNS / name) for name in ("base", "new", "former")),
        "--history",
        str(folder / "history.sqlite"),
    )
    quietly("history", "annotate", "run-002", "--note", "meant", "--history", str(folder / "history.sqlite"))
    (folder / "traces").mkdir()
    for rank in range(2):
        file = RankFile(rank, 2)
        for number in range(3):
            start = 1_000.0 * number
            file.step(number, start, start + 900)
            file.kernel(start + 100, start + 400)
            file.collective("allreduce", start + 300, start + 700, 1 << 20, (0, 1))
        file.write(folder / "traces", zipped=rank == 1)
    (folder / "asked").mkdir()
    for name, content in ASKED.items():
        (folder / "asked" / name).write_bytes((toml if name.endswith(".toml") else dumped)(content))
    for name, text in PRINTED.items():
        (folder / "asked" / f"{name}.log").write_text(text)


def _pairs(line: bytes) -> list[bytes]:
    """Return a line's measurement as those of a matrix of pairs."""
    found = []
    for source, target in ((0, 1), (1, 0)):
        record = msgspec.json.decode(line)
        record["case"] |= {"id": f"pair-{source}", "name": "p2p.matrix", "defaults": {}}
        record["case"]["params"] |= {"source": source, "target": target}
        found.append(msgspec.json.encode(record) + b"\n")
    return found


def quietly(*words: str) -> tuple[int, str, str]:
    """Run a command here; return its exit code and output."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", errors="replace")
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(list(words), prog_name="parbench")
        except SystemExit as ended:
            code = ended.code
    texts = []
    for one in (out, err):
        one.flush()
        texts.append(one.buffer.getvalue().decode(errors="replace"))
    return code or 0, texts[0], texts[1]


def commands_of_run(run: str, other: str, out: str) -> list[Words]:
    kept = ("--history", f"{out}/new.sqlite")
    return [
        ("report", run, "-o", f"{out}/report.html"),
        ("report", run),
        *(("report", run, "--format", form) for form in ("markdown", "csv", "json")),
        ("report", run, other, "-o", f"{out}/both.html"),
        ("show", run),
        ("show", "--all", run),
        *(("export", run, "--format", form, "-o", f"{out}/{form}.txt") for form in EXPORTS),
        *(("export", run, "--format", form, "-o", f"{out}/{form}") for form in ("hta", "chrome-trace")),
        ("export", run, "--format", "github-action-benchmark", "-o", f"{out}/action"),
        ("compare", run, other),
        ("compare", other, run, "--format", "json"),
        ("compare", run, run, "--format", "junit"),
        ("plan", "--validate", run),
        ("plan", "--validate", other, "--fits", run),
        ("plan", "--model", "tiny", "--mesh", "dp=2", "--precision", "float32", "--fits", run),
        ("plan", "--model", "tiny", "--mesh", "dp=2", "--precision", "float32", "--calibrate", run),
        ("history", "add", run, *kept),
        ("explain", f"{run}/traces", "--against", run),
        ("load", run),
    ]


def commands_of_history(file: str, run: str, out: str) -> list[Words]:
    kept = ("--history", file)
    return [
        ("history", "list", *kept),
        ("history", "show", *kept),
        ("history", "show", "--format", "json", *kept),
        ("history", "check", *kept),
        ("history", "check", "--format", "json", *kept),
        ("history", "check", run, *kept),
        ("history", "export", f"{out}/kept", *kept),
        ("history", "export", f"{out}/otava.csv", "--format", "otava", *kept),
        ("compare", "main", run, *kept),
        ("compare", "last:5", "main~1", *kept),
        ("history", "annotate", "run-003", "--note", "x", *kept),
        ("history", "add", run, *kept),
        ("history", "prune", "--keep", "3", *kept),
    ]


def commands_of_sweep(sweep: str, run: str, out: str) -> list[Words]:
    return [
        ("report", sweep, "-o", f"{out}/sweep.html"),
        ("report", sweep, "--format", "markdown"),
        ("show", sweep),
        ("show", "--all", sweep),
        ("slurm", "status", sweep),
        ("slurm", "status", "--json", sweep),
        ("slurm", "collect", sweep),
        ("slurm", "resume", sweep),
        ("load", sweep),
    ]


def commands_of_traces(traces: str, run: str, out: str) -> list[Words]:
    return [
        ("explain", traces),
        ("explain", traces, "--against", run),
        ("explain", traces, "--format", "json"),
        ("explain", traces, "-o", f"{out}/explained.html"),
    ]


def commands_of_asked(asked: str, run: str, other: str, out: str) -> list[Words]:
    mesh = ("--mesh", "dp=2,fsdp=2,tp=2")
    return [
        ("plan", "--model", f"{asked}/config.json", "--gpus", "8"),
        ("plan", "--model", f"{asked}/config.json", *mesh, "--explain"),
        ("plan", "--model", f"{asked}/model.toml", *mesh, "-o", f"{out}/plan.html"),
        ("plan", "--model", f"{asked}/model.toml", "--gpus", "8", "--guide"),
        ("plan", "--model", "tiny", *mesh, "--hardware", f"{asked}/hardware.toml", "-o", f"{out}/plan.json"),
        ("plan", "--model", "tiny", "--gpus", "16", "--hardware", f"{asked}/hardware.toml"),
        ("compare", run, other, "--budgets", f"{asked}/budgets.toml"),
        ("slurm", "submit", f"{asked}/sweep.toml", "--dry-run"),
        *(
            ("import", f"{asked}/{name}.log", "--from", name, "--nproc", "8", "--out", f"{out}/runs")
            for name in PRINTED
        ),
        ("show", "--all", f"{out}/runs"),
    ]


def prepare(home: Path, originals: Path, draw: random.Random) -> tuple[str, list[Words], list[Path]]:
    """Spoil a copy; return what was done, the commands that read it and what they may write."""
    kind = draw.choices(("run", "history", "sweep", "traces", "asked"), (6, 2.5, 1, 0.5, 2))[0]
    out, run, other = home / "out", home / "given" / "run", originals / "run" / draw.choice(("base", "new", "steps"))
    for folder in ("out", "tmp", "here", "given", "canary"):
        (home / folder).mkdir(parents=True)
    name = draw.choice(("base", "former", "new", "steps", "steps", "steps"))
    allowed = [out, home / "tmp"]
    if kind == "run":
        shutil.copytree(originals / "run" / name, run, symlinks=True)
        _shorten(run, draw)
        told = f"run {name}: {', '.join(spoil_folder(run, draw))}"
        allowed += [run / "report.html", run / "plan.json", other / "plan.json"]
        return told, commands_of_run(str(run), str(other), str(out)), allowed
    if kind == "history":
        file = home / "given" / "history.sqlite"
        shutil.copy(originals / "history.sqlite", file)
        told = f"history: {spoil_history(file, draw)}"
        allowed += [file, *(file.with_name(f"{file.name}-{more}") for more in ("journal", "wal", "shm"))]
        night = originals / "nights" / "run-009"
        return told, commands_of_history(str(file), str(night), str(out)), allowed
    if kind == "sweep":
        sweep = home / "given" / "sweep"
        shutil.copytree(originals / "sweep", sweep, symlinks=True)
        told = f"sweep: {', '.join(spoil_folder(sweep, draw))}"
        return told, commands_of_sweep(str(sweep), str(other), str(out)), [*allowed, sweep]
    if kind == "asked":
        shutil.copytree(originals / "asked", home / "given" / "asked")
        told = f"asked: {', '.join(spoil_folder(home / 'given' / 'asked', draw))}"
        runs = (str(originals / "run" / "base"), str(originals / "run" / "new"))
        return told, commands_of_asked(str(home / "given" / "asked"), *runs, str(out)), allowed
    traces = home / "given" / "traces"
    shutil.copytree(originals / "traces", traces)
    told = f"traces: {', '.join(spoil_folder(traces, draw))}"
    return told, commands_of_traces(str(traces), str(other), str(out)), allowed


def _shorten(run: Path, draw: random.Random) -> None:
    """Keep some records, that more folders are tried in the same time."""
    file = run / "records.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    kept = draw.sample(range(len(lines)), min(len(lines), draw.choice((2, 4, 10, 20))))
    file.write_bytes(b"".join(lines[i] for i in sorted(kept)))


def listing(home: Path, allowed: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Return what is in a folder beside what may change."""
    free, found = tuple(map(str, allowed)), dict[str, tuple[int, ...]]()
    for place, _, names in os.walk(home):
        if place.startswith(free):
            continue
        for name in [".", *names]:
            path = os.path.join(place, name)  # noqa: PTH118 - of many files
            if not path.startswith(free):
                known = os.lstat(path)
                found[path] = (known.st_mode, known.st_size * (name != "."), known.st_mtime_ns * (name != "."))
    return found


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SLURM = ("squeue", "sinfo", "scontrol", "scancel", "sacct", "sbatch")  # of which none is there
_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"}


def watch(allowed: Sequence[Path], outside: list[str]) -> None:
    """Note every file of this process that is opened for writing, made or removed elsewhere."""
    free = tuple(str(path.parent.resolve() / path.name) for path in allowed)  # a link there is replaced, not followed

    def hook(event: str, args: tuple[Any, ...]) -> None:
        paths: Sequence[Any] = ()
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            mode, flags = args[1:]
            writes = set(mode) & set("wax+") if isinstance(mode, str) else (flags or 0) & _WRITES
            paths = args[:1] if writes else ()
        elif event in _EVENTS:
            paths = args[:2] if event in ("os.rename", "os.link") else args[1:2] if event == "os.symlink" else args[:1]
        elif event in ("subprocess.Popen", "os.system", "socket.connect") and args[0] not in _SLURM:
            outside.append(f"{event} {args[:2]}")
        for path in paths:
            if isinstance(path, int) or (event in ("os.remove", "os.rmdir") and args[1] != -1):
                continue  # within a folder that is open, as shutil removes its own
            at = os.fsdecode(path)
            folder, name = os.path.split(at)
            real = os.path.join(os.path.realpath(folder or "."), name)  # noqa: PTH118 - of no Path
            beside = real.rpartition("/")[0] + "/" + name.lstrip(".").rpartition(".")[0]  # of what is written whole
            if event == "os.mkdir" and os.path.isdir(real):  # noqa: PTH112 - of no Path
                continue
            if not real.startswith(free) and beside not in free and real not in ("/dev/null", "/dev/tty"):
                outside.append(f"{event} {at!r}")

    sys.addaudithook(hook)


def load(words: Words) -> None:
    for way in (parbench.load, parbench.load_samples, lambda run: parbench.load_samples(run, by_rank=True)):
        with contextlib.suppress(parbench_error()):
            way(words[1])


def parbench_error() -> type[ValueError]:
    from parbench.bench.text import UserError

    return UserError


def try_one(home: Path, originals: Path, seed: int, count: int | None, tell: bool) -> Found:
    """Spoil and read one folder in this process, which ends with it."""
    draw = random.Random(seed)
    told, commands, allowed = prepare(home, originals, draw)
    found = Found(seed=seed, told=told)
    os.environ.update(TMPDIR=str(home / "tmp"), HOME=str(home / "here"), PATH="/nonexistent", COLUMNS="120")
    tempfile.tempdir = None
    os.chdir(home / "here")
    before, outside = listing(home, allowed), list[str]()
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    watch(allowed, outside)
    for words in commands if count is None else draw.sample(commands, min(count, len(commands))):
        found.commands += 1
        _try_command(words, found, outside, tell)
        if any(kind == "hang" for kind, *_ in found.findings):
            break
    os.chdir("/")
    changed = dict(before.items() ^ listing(home, allowed).items())
    found.findings += [("outside", "listing", path) for path in sorted(changed)[:3]]
    return found


def _try_command(words: Words, found: Found, outside: list[str], tell: bool) -> None:
    def hung(*_: object) -> None:
        raise Hung

    signal.signal(signal.SIGPROF, hung)
    signal.signal(signal.SIGALRM, hung)
    command, began, code, err = " ".join(words[:3]), time.process_time(), None, ""
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        if words[0] == "load":
            load(words)
        else:
            code, _, err = quietly(*words)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Hung as error:
        found.findings.append(("hang", command, _where(error)))
    except MemoryError as error:
        found.findings.append(("memory", command, _where(error)))
    except BaseException as error:  # noqa: BLE001 - whatever else is a finding
        kind = "memory" if "allocate memory" in str(error) else "traceback"
        found.findings.append((kind, command, f"{type(error).__name__}: {str(error)[:100]!r} {_where(error)}"))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    found.findings += [(kind, command, what) for kind, what in _faults(code, err)]
    found.findings += [("outside", command, one) for one in dict.fromkeys(outside)]
    outside.clear()
    if tell:
        sentence = err.strip()
        print(
            f"  {time.process_time() - began:5.2f} s, exit {code}: {' '.join(words)}\n      {sentence[:300]}",
            flush=True,
        )


def _faults(code: int | None, err: str) -> Iterator[tuple[str, str]]:
    """Yield what a command's exit code and errors show that no bad input may cause."""
    if code not in (None, 0, 1, 2, 3, 4):
        yield "traceback", f"exit code {code!r}"
    sentence = err.strip()
    if "Traceback (most recent call last)" in err:  # a defect ends with 4, and this
        at = [line.strip() for line in err.splitlines() if line.strip().startswith("File ")]
        ours = [line for line in at if any(f"/{name}/" in line for name in PACKAGES)] or at
        yield "traceback", f"{sentence.splitlines()[-1][:120]} {_short(ours[-1])}"
    elif code == 4 and err.startswith("parbench: "):
        yield "memory", sentence[:200]
    if code == 2 and (not sentence or "\n" in sentence.partition("parbench: ")[2] or len(sentence) > 1500):
        yield "sentence", f"{len(sentence)} characters: {sentence[:120]!r}"
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in err):
        yield "sentence", f"control characters: {sentence[:120]!r}"


def _short(line: str) -> str:
    """Return a line of a traceback as file:line and function."""
    path, number, name = re.fullmatch(r'File "(.*)", line (\d+), in (.*)', line).groups()  # type: ignore[union-attr]
    return f"{'/'.join(Path(path).parts[-3:])}:{number} {name}"


def _where(error: BaseException) -> str:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in one.filename]
    ours = [one for one in frames if any(f"/{name}/" in one.filename for name in PACKAGES)]
    for one in (ours or frames)[-1:]:
        return f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno} {one.name}"
    return "-"


def forked(home: Path, originals: Path, seed: int, count: int | None, tell: bool) -> tuple[int, int]:
    """Start a process that tries one folder; return its id and the pipe on which it tells what it found."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(read)
            found = try_one(home, originals, seed, count, tell)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(msgspec.json.encode(found))
        except BaseException:  # noqa: BLE001 - a fault of the study's own
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    return child, read


def tries(
    scratch: Path, originals: Path, seeds: Sequence[int], count: int | None, workers: int, tell: bool
) -> Iterator[Found]:
    """Yield what each folder showed, several at a time; one that never answers is ended."""
    waiting, running = list(reversed(seeds)), dict[int, tuple[int, int, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            seed = waiting.pop()
            child, read = forked(scratch / str(seed), originals, seed, count, tell)
            running[child] = seed, read, time.monotonic()
        for child, (seed, read, began) in list(running.items()):
            late = time.monotonic() - began > 3 * WALL_SECONDS
            if late:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if ended:
                with os.fdopen(read, "rb") as pipe:
                    content = pipe.read()
                del running[child]
                shutil.rmtree(scratch / str(seed), ignore_errors=True)
                how = "hang" if late else "memory"
                yield (
                    msgspec.json.decode(content, type=Found)
                    if content
                    else Found(seed=seed, told="?", findings=[(how, "the process", f"ended with {status}")])
                )
        time.sleep(0.002)


def preload() -> None:
    """Import once what the commands need, before memory is counted."""
    import jinja2  # noqa: F401
    import numpy as np
    import pandas as pd  # noqa: F401
    import scipy.optimize  # type: ignore[import-untyped]
    import scipy.stats  # type: ignore[import-untyped]  # noqa: F401

    np.linalg.svd(np.eye(3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folders", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*")
    given = parser.parse_args()
    preload()
    warnings.simplefilter("ignore")
    seeds = given.only or range(given.seed * 1_000_000, given.seed * 1_000_000 + given.folders)
    counts, commands, known, began = Counter[str](), 0, set[tuple[str, str]](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        scratch = Path(name)
        originals = scratch / "originals"
        originals.mkdir()
        make_originals(originals)
        warm(originals)
        for found in tries(
            scratch, originals, seeds, None if given.only else given.commands, given.workers, bool(given.only)
        ):
            counts["folders"] += 1
            commands += found.commands
            if counts["folders"] % 100 == 0:
                print(f"{counts['folders']} folders, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            counts.update({kind for kind, *_ in found.findings})
            for kind, command, where in found.findings:
                place = kind, where.rpartition(" ")[0].rpartition(" ")[2] if kind != "outside" else command
                if place not in known:
                    known.add(place)
                    print(f"{kind}: {where}\n    parbench {command}   (seed {found.seed}, {found.told})", flush=True)
    print(f"\n{counts['folders']} folders, {commands} commands, {time.monotonic() - began:.0f} s")
    bad = ("traceback", "hang", "memory", "outside", "sentence")
    print(f"{'tried':>8}" + "".join(f"{name:>12}" for name in bad))
    print(f"{counts['folders']:>8}" + "".join(f"{counts[name]:>12}" for name in bad))
    return 1 if any(counts[name] for name in bad) else 0


def warm(originals: Path) -> None:
    """Run each kind of command once on what is whole, so that its imports are in every fork."""
    with tempfile.TemporaryDirectory() as out:
        run = str(originals / "run" / "steps")
        for words in commands_of_run(run, str(originals / "run" / "base"), out):
            load(words) if words[0] == "load" else quietly(*words)
        quietly("history", "check", "--history", str(originals / "history.sqlite"))


if __name__ == "__main__":
    sys.exit(main())
