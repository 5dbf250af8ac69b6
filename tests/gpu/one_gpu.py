"""Runs parts in the order of their worth, each within its own time, and says of each finding pass, fail or skip.

one_gpu.py [--rehearse] [--only PART,...] [FOLDER]; ``one_gpu.sh`` finds the Python. Standard library alone: what the
machine lacks is unpacked from ``wheels/``. After each part FOLDER has ``summary.txt``, ``records.jsonl`` and
``everything.tar.gz``, at the end also ``report.html``. Exit code 1 if a line says fail.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WHOLE_SECONDS = 520.0
HANGS = "tests/gpu/test_gpu_hangs.py"
NONE: Mapping[str, str] = {}
Record = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A finding in words, and the number that others are held to."""

    name: str
    verdict: str
    figure: str
    value: float | None = None

    @property
    def text(self) -> str:
        return f"{self.verdict:4}  {self.name:44}  {self.figure}"


def held(name: str, ok: bool, figure: str) -> Line:
    return Line(name, "pass" if ok else "fail", figure)


@dataclass
class Session:
    """Where things are put, what was found, and until when the present part may go on."""

    folder: Path
    work: Path
    rehearse: bool
    lines: list[Line] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    until: float = 0.0

    @property
    def place(self) -> tuple[str, ...]:
        """One rank on the GPU, in a rehearsal on the CPU."""
        return ("--device", self.device, "--nproc", "1", "--allow-single", "--launches", "1")

    @property
    def two(self) -> tuple[str, ...]:
        return ("--device", self.device, "--backend", "gloo", "--nproc", "2", "--launches", "1")

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def command(
        self, name: str, *words: str, cwd: Path = ROOT, variables: Mapping[str, str] = NONE
    ) -> tuple[int | None, str]:
        """Return the exit code, None if it took too long, and what was printed, which is also kept as a log."""
        log = self.work / "logs" / f"{name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=cwd,
                env={**os.environ, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            code = None
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(max(1.0, self.until - time.monotonic()))
            for sign, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    if process.poll() is None:
                        os.killpg(process.pid, sign)
                        process.wait(seconds)
        return code, log.read_text(errors="replace")

    def parbench(
        self, name: str, *words: str, cwd: Path = ROOT, budget: float = 60
    ) -> tuple[list[Record], list[Line]]:
        """Run ``parbench run``; return its records, and a line that says whether all is well."""
        if self.rehearse:
            budget = 15 if budget < 60 else budget
        else:
            budget = min(budget, max(5.0, self.until - time.monotonic() - 25))
        out = self.work / "runs" / name
        more = ("--budget", f"{budget:.0f}s", "--out", str(out))
        code, told = self.command(name, "-m", "parbench", "run", *words, *more, cwd=cwd)
        records = []
        for path in out.glob("*/records.jsonl"):
            self.runs.append(path.parent)
            records += [json.loads(line) for line in path.read_text().splitlines()]
        records = list({(one["case"]["id"], one["launch"]): one for one in records}.values())
        counts = Counter(one["status"] for one in records)
        figure = ", ".join(f"{count} {status}" for status, count in counts.items()) or last_words(
            told
        )
        if late := sum("out of time" in (one["reason"] or "") for one in records):
            figure += f" ({late} of them for want of time)"
        bad = [one for one in records if one["status"] not in ("ok", "skipped")]
        if bad:
            figure += f"; {label(bad[0])}: {bad[0]['reason']}"
        if code is None:
            figure += "; cut off by the clock"
        return records, [held(name, bool(counts["ok"]) and not bad and code is not None, figure)]

    def probe(self, part: str, variables: Mapping[str, str]) -> Iterator[Line]:
        """Return what a part of ``gpu_probes`` found, as far as it came."""
        code, told = self.command(
            part, str(HERE / "gpu_probes.py"), *self.rehearsing, part, variables=variables
        )
        for line in told.splitlines():
            if line.startswith('{"name"'):
                yield Line(**json.loads(line))
        if code != 0:
            yield Line(
                f"probe {part}", "fail", "took too long" if code is None else last_words(told)
            )

    @property
    def rehearsing(self) -> list[str]:
        return ["--rehearse"] if self.rehearse else []

    def value(self, name: str) -> float | None:
        return next((line.value for line in self.lines if line.name == name), None)

    def write(self) -> None:
        """Leave what is known so far, whatever may come."""
        (self.folder / "summary.txt").write_text("".join(f"{line.text}\n" for line in self.lines))
        with (self.folder / "records.jsonl").open("w") as file:
            for run in self.runs:
                file.write((run / "records.jsonl").read_text())
        with tarfile.open(self.folder / "everything.tar.gz", "w:gz", compresslevel=1) as tar:
            tar.add(self.work, arcname="one_gpu")


def last_words(told: str) -> str:
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def label(record: Record) -> str:
    params = record["case"]["params"]
    return " ".join(
        [record["case"]["name"], *(f"{name}={value}" for name, value in params.items())]
    )


def metric(records: Iterable[Record], case: str, name: str, **params: object) -> float | None:
    """Return a metric of the first record of a case that is well and has these parameters."""
    for one in records:
        whole = {**one["case"]["defaults"], **one["case"]["params"]}
        well = one["status"] == "ok" and one["case"]["name"] == case
        if well and params.items() <= whole.items() and name in one["metrics"]:
            return float(one["metrics"][name]["value"])
    return None


def beside(
    session: Session, name: str, found: float | None, bare: str, low: float, high: float
) -> Line:
    """Hold a time of parbench's against that of a bare loop."""
    known = session.value(bare)
    if found is None or known is None:
        return Line(name, "skip", f"parbench {found}, bare {known}: one of them is unknown")
    told = f"{found * 1e6:.2f} us beside {known * 1e6:.2f} us bare: ratio {found / known:.3f}"
    return held(name, session.rehearse or low <= found / known <= high, told)


def machine(session: Session) -> Iterator[Line]:
    _, told = session.command("torch", "-c", FACTS)
    yield Line("machine", "pass", f"{last_words(told)}, Python {platform.python_version()}")
    smi = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,memory.total,memory.used,mig.mode.current"
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", f"--query-gpu={smi}", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        yield Line("nvidia-smi", "pass", done.stdout.strip() or last_words(done.stderr))
    code, told = session.command("doctor", "-m", "parbench", "doctor")
    yield held("doctor", code in (0, 1), f"exit code {code}, {len(told.splitlines())} lines")


FACTS = """
import torch
gpu = torch.cuda.is_available()
name = torch.cuda.get_device_name() if gpu else "no GPU"
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpu else "-"
print(f"{name}, torch {torch.__version__}, NCCL {nccl}")
"""


def marked(session: Session) -> Iterator[Line]:
    """Run the tests marked gpu; a rehearsal collects them, so that they import."""
    yield from tested(session, "tests/gpu", f"--ignore={HANGS}")


def hangs_at_length(session: Session) -> Iterator[Line]:
    yield from tested(session, HANGS)


def tested(session: Session, *paths: str) -> Iterator[Line]:
    quiet = ("-p", "no:cacheprovider", "-W", "default", "--tb=short", "-v")
    code, told = session.command(
        f"pytest {Path(paths[0]).name}", "-m", "pytest", *quiet, "-m", "gpu", *paths
    )
    found = dict(
        re.findall(r"^(tests/gpu/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|RERUN)", told, re.MULTILINE)
    )
    counts = Counter(found.values())
    figure = ", ".join(
        f"{count} {verdict.lower()}" for verdict, count in counts.items()
    ) or last_words(told)
    well = code == (5 if session.rehearse else 0)
    name = f"tests marked gpu: {' '.join(paths)}"
    yield held(name, well, figure + ("" if code is not None else "; cut off by the clock"))
    for test, verdict in found.items():
        if verdict in ("FAILED", "ERROR"):
            yield Line(f"  {test.removeprefix('tests/gpu/')}", "fail", verdict.lower())


def one_rank(session: Session) -> Iterator[Line]:
    """Take every collective in every mode at 1K and 256M."""
    modes = "blocking,pipelined,async,coalesced" + ("" if session.rehearse else ",graph")
    sizes = "1K,64K" if session.rehearse else "1K,256M"
    asked = ("--only", "collective.*", "--sizes", sizes, "--set", f"mode={modes}")
    records, lines = session.parbench("collectives", *session.place, *asked, budget=30)
    yield from lines
    for name in ("all_reduce", "all_gather"):
        for mode, low, high in (("blocking", 0.8, 1.25), ("graph", 0.8, 1.25)):
            found = metric(records, f"collective.{name}", "time", size_bytes=1024, mode=mode)
            yield beside(
                session,
                f"{mode} {name} of 1K",
                found,
                f"bare {mode} {name} of 1K, one rank",
                low,
                high,
            )


def every_type(session: Session) -> Iterator[Line]:
    """Take every collective in every type at 1K and 256M, and every reduction at 1K."""
    types = ["float32", "bfloat16", "int8"]
    if not session.rehearse:
        types += [
            "float64",
            "float16",
            "int64",
            "int32",
            "uint8",
            "bool",
            "float8_e4m3fn",
            "float8_e5m2",
        ]
    sizes = ["1K"] if session.rehearse else ["1K", "256M"]
    cases = [f'[[case]]\nname = "collective.*"\nset = {{ size_bytes = {sizes}, dtype = {types} }}']
    for name in ("all_reduce", "reduce_scatter"):
        redops = ["min", "max", "product"]
        cases.append(
            f'[[case]]\nname = "{name}"\nset = {{ size_bytes = "1K", dtype = {types}, redop = {redops} }}'
        )
    plan = session.work / "types.toml"
    plan.write_text("\n".join(cases))
    yield from session.parbench("types", *session.place, "--plan", str(plan), budget=25)[1]


def memory(session: Session) -> Iterator[Line]:
    size = "1M" if session.rehearse else "1G"
    asked = (
        "--only",
        "memory.copy",
        "--only",
        "compute.gemm",
        "--sizes",
        size,
        "--set",
        "m=512,4096",
    )
    if session.rehearse:
        asked = (*asked[:-1], "m=128")
    records, lines = session.parbench("memory and products", *session.place, *asked, budget=8)
    yield from lines
    rate = metric(records, "memory.copy", "algbw")
    if rate is not None:
        on_h200 = "H200" in session.lines[0].figure
        told = f"{2 * rate / 1e12:.3f} TB/s read + written; {2 * rate / 4.3e12:.3f} of 4.3"
        yield held("memory.copy", not on_h200 or abs(2 * rate / 4.3e12 - 1) <= 0.1, told)


def health(session: Session) -> Iterator[Line]:
    """Check the GPU by itself: right results, and what its driver tells."""
    place = ("--device", session.device, "--nproc", "2" if session.rehearse else "1")
    words = (
        "check",
        *place,
        "--budget",
        "15s" if session.rehearse else "25s",
        "--out",
        str(session.work / "check"),
        "--json",
    )
    code, told = session.command("check", "-m", "parbench", *words)
    found: Record = next(
        (json.loads(line) for line in told.splitlines() if line.startswith('{"verdict"')), {}
    )
    figures = [f"{name} {rate['value']:.3g} {rate['unit']}" for one in found.get("devices", ())[:1]
               for name, rate in one["rates"].items()]  # fmt: skip
    rates = ", ".join(figures) or last_words(told)
    well = code == 0 or (
        session.rehearse and bool(figures)
    )  # on cores that others use, whatever the verdict
    yield held("check", well, f"{found.get('verdict')}: {rates}")


def llama(session: Session) -> Iterator[Line]:
    """Train one llama-shaped step, as large as the bare one."""
    sizes = [
        "shape=small-llama",
        "layers=8",
        "hidden=2048",
        "heads=16",
        "kv_heads=8",
        "ffn=5632",
        "sequence=2048",
    ]
    sizes = ["shape=tiny-llama"] if session.rehearse else [*sizes, "vocabulary=32000"]
    settings = [
        word for size in (*sizes, "precision=bfloat16", "microbatch=4") for word in ("--set", size)
    ]
    records, lines = session.parbench(
        "llama-shaped step", *session.place, "--only", "ddp", *settings, budget=20
    )
    yield from lines
    yield beside(
        session,
        "llama-shaped step",
        metric(records, "workload.ddp", "step_time"),
        "bare llama-shaped step",
        0.9,
        1.02,
    )
    mfu = metric(records, "workload.ddp", "mfu")
    yield Line("mfu of it", "skip" if mfu is None else "pass", "-" if mfu is None else f"{mfu:.1%}")


def steps(session: Session) -> Iterator[Line]:
    shape = "tiny" if session.rehearse else "small-llama"
    asked = ("--only", "workload.*", "--set", f"shape={shape}", "--set", "tp=1", "--set", "shard=1")
    precisions = "float32" if session.rehearse else "float32,bfloat16"
    real = (*asked, "--set", f"precision={precisions}")
    yield from session.parbench("steps that compute", *session.place, *real, budget=35)[1]


def timed(session: Session) -> Iterator[Line]:
    shape, wait = ("tiny", "2ms") if session.rehearse else ("small-llama", "20ms")
    asked = ("--only", "workload.*", "--set", f"shape={shape}", "--set", "tp=1", "--set", "shard=1")
    yield from session.parbench(
        "steps that wait", *session.place, *asked, "--set", f"compute=timed:{wait}", budget=25
    )[1]


def on_gloo(session: Session) -> Iterator[Line]:
    """Take on one GPU what gloo carries there, and see the rest refused."""
    sizes = "1K" if session.rehearse else "1K,16M"
    asked = ("--only", "collective.*", "--sizes", sizes, "--set", "mode=blocking,pipelined,async")
    yield from session.parbench("gloo: collectives, 2 ranks", *session.two, *asked, budget=15)[1]
    named = [word for name in ("ddp*", "zero1", "ep_dispatch", "cp") for word in ("--only", name)]
    settings = ("--set", "shape=tiny", "--set", "method=ulysses,allgather_kv")
    yield from session.parbench("gloo: steps, 2 ranks", *session.two, *named, *settings, budget=20)[
        1
    ]
    for name, words in (
        ("p2p", ("--only", "sendrecv", "--sizes", "1K")),
        ("coalesced", ("--only", "all_gather", "--sizes", "1K", "--set", "mode=coalesced")),
        ("fsdp", ("--only", "fsdp")),
    ):
        if not session.rehearse:
            code, told = session.command(
                f"refusal of {name}", "-m", "parbench", "run", *session.two, *words
            )
            yield held(f"gloo: {name} is refused", code == 2 and "gloo" in told, last_words(told))


def hangs(session: Session) -> Iterator[Line]:
    """Let rank 1 sleep or keep the device busy: each is told of, and the case after them is measured."""
    before, ways = used_mib(), ["asleep"] if session.rehearse else ["asleep", "spinning"]
    asked = (
        "--target",
        "tests.support.faults:several",
        "--set",
        f"how={','.join(ways)},fine",
        "--timeout",
        "10s",
    )
    records, _ = session.parbench("hangs", *session.two, *asked)
    by_how = {one["case"]["params"]["how"]: one for one in records}
    nothing = {"status": "no record", "reason": ""}
    for how in ways:
        one = by_how.get(how, nothing)
        well = one["status"] == "hang" and "rank 1" in one["reason"]
        yield held(f"rank 1 is {how}", well, f"{one['status']}: {one['reason']}")
    last = by_how.get("fine", nothing)
    yield held(
        "the case after a hang", last["status"] == "ok", f"{last['status']} {last['reason'] or ''}"
    )
    after = used_mib()
    if before is not None and after is not None:
        yield held(
            "memory freed after hangs",
            after - before < 64,
            f"{before} MiB used before, {after} MiB after",
        )


def used_mib() -> int | None:
    """Return the MiB that are used on the GPU; None where nvidia-smi does not tell."""
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(
            subprocess.run(
                query, capture_output=True, text=True, timeout=20, check=True
            ).stdout.split()[0]
        )
    return None


def page(session: Session) -> Iterator[Line]:
    runs = [str(run) for run in session.runs]
    output = session.folder / "report.html"
    code, told = session.command("page", "-m", "parbench", "report", *runs, "-o", str(output))
    size = output.stat().st_size / 1e6 if output.exists() else 0.0
    yield held("page of all runs", code == 0, f"{size:.1f} MB" if code == 0 else last_words(told))


@dataclass(frozen=True)
class Part:
    """What is tried, and the seconds after which it is given up."""

    name: str
    act: Callable[[Session], Iterator[Line]]
    seconds: float


def of(act: Callable[[Session], Iterator[Line]], seconds: float) -> Part:
    return Part(act.__name__, act, seconds)


def probed(name: str, seconds: float, variables: Mapping[str, str] = NONE) -> Part:
    return Part(name, lambda session: session.probe(name, variables), seconds)


RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
PARTS = (
    of(machine, 40),
    probed("reference", 70),
    of(one_rank, 75),
    of(memory, 35),
    of(health, 60),
    of(llama, 60),
    of(marked, 140),
    of(steps, 75),
    of(on_gloo, 90),
    of(hangs, 75),
    probed("capture", 40, RECORDER),
    probed("grouped", 25),
    of(every_type, 60),
    of(timed, 55),
    probed("sleeping", 40),
    probed("pair", 40),
    of(page, 30),
    of(hangs_at_length, 170),
)


def unpack(site: Path) -> list[str]:
    """Unpack the wheels of what this Python lacks; return their names."""
    found = []
    for wheel in sorted((HERE / "wheels").glob("*.whl")):
        name = wheel.name.partition("-")[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            zipfile.ZipFile(wheel).extractall(site)
            found.append(name)
    return found


def main() -> int:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--rehearse", action="store_true", help="on a CPU with gloo, small")
    words.add_argument(
        "--only", metavar="PART,...", help=f"some of {', '.join(part.name for part in PARTS)}"
    )
    words.add_argument("folder", nargs="?", default=f"one_gpu-{time.strftime('%Y%m%dT%H%M%S')}")
    asked = words.parse_args()
    chosen = asked.only.split(",") if asked.only else [part.name for part in PARTS]
    folder, began = Path(asked.folder).resolve(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    slower = 4 if asked.rehearse else 1  # a CPU that others use
    with tempfile.TemporaryDirectory() as scratch:
        work, site = Path(scratch) / "work", Path(scratch) / "site"
        (work / "logs").mkdir(parents=True)
        session, unpacked = Session(folder, work, asked.rehearse), unpack(site)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(site)])
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        if asked.rehearse:  # cores that others use too make threads wait for one another
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        print(f"{folder}: unpacked {', '.join(unpacked) or 'nothing'}", flush=True)
        for part in PARTS:
            if part.name in chosen:
                session.until = min(
                    time.monotonic() + slower * part.seconds, began + slower * WHOLE_SECONDS
                )
                for line in take(part, session):
                    session.lines.append(line)
                    print(f"{time.monotonic() - began:5.0f} s  {line.text}", flush=True)
                session.write()
        counts = Counter(line.verdict for line in session.lines)
        ended = (
            f"{'rehearsed' if asked.rehearse else 'ended'} after {time.monotonic() - began:.0f} s"
        )
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        session.lines.append(held("all", not counts["fail"], f"{ended}: {told}"))
        session.write()
    print(session.lines[-1].text)
    return int(bool(counts["fail"]))


def take(part: Part, session: Session) -> Iterator[Line]:
    """Return a part's lines, and one of what it raises: the rest goes on."""
    if session.until - time.monotonic() < 10:
        yield Line(part.name, "skip", "no time was left")
        return
    try:
        yield from part.act(session)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        yield Line(part.name, "fail", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
