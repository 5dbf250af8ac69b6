"""Run parts in the order of their value, each within its time, and report pass, fail or skip.

    one_gpu.py [--rehearse] [--only PART,...] [FOLDER]

``one_gpu.sh`` finds the Python. Only the standard library is imported, and what the machine lacks
is unpacked from ``wheels/``. After each part FOLDER has ``summary.txt``, ``records.jsonl`` and
``everything.tar.gz``, and at the end ``report.html``. The exit code is 1 if a line says fail.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GPU_TESTS = Path(__file__).parent
ROOT = GPU_TESTS.parents[1]
TOTAL_SECONDS = 520.0
REHEARSAL_SLOWDOWN = 4
REHEARSAL_SECONDS = 12
MIN_PART_SECONDS = 10
MAX_MESSAGE_CHARACTERS = 300
HANG_TESTS = "tests/gpu/test_gpu_hangs.py"
NO_TESTS_COLLECTED = 5
H200_COPY_BYTES_PER_SECOND = 4.3e12
Record = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of the summary; ``value`` is compared with later results."""

    name: str
    verdict: str  # pass, fail or skip
    figure: str
    value: float | None = None

    @property
    def text(self) -> str:
        return f"{self.verdict:4}  {self.name:44}  {self.figure}"


def make_line(name: str, passed: bool, figure: str) -> Line:
    return Line(name, "pass" if passed else "fail", figure)


@dataclass
class Session:
    """Folders, results so far, and the deadline of the current part."""

    folder: Path
    work: Path
    rehearse: bool
    lines: list[Line] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    deadline: float = 0.0  # of time.monotonic()

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def one_rank_options(self) -> list[str]:
        options = f"--device {self.device} --nproc 1 --repetitions 1"
        return options.split()

    @property
    def two_ranks_options(self) -> list[str]:
        return f"--device {self.device} --backend gloo --nproc 2 --repetitions 1".split()

    def run_python(self, name: str, *args: str) -> tuple[int | None, str]:
        """Return the exit code, None after the deadline, and the output, which a log file keeps."""
        log = self.work / "logs" / f"{name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *args],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            exit_code = None
            with suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(max(1.0, self.deadline - time.monotonic()))
            stop_process(process)
        return exit_code, log.read_text(errors="replace")

    def run_parbench(
        self, name: str, *options: str, budget: float
    ) -> tuple[list[Record], Line]:
        """Run ``parbench run`` and return its records and a line with the statuses."""
        if self.rehearse:
            budget = REHEARSAL_SECONDS
        else:
            remaining = self.deadline - time.monotonic() - 25
            budget = min(budget, max(5.0, remaining))
        out = self.work / "runs" / name
        limits = ["--budget", f"{budget:.0f}s", "--out", str(out)]
        command = ["-m", "parbench", "run", *options, *limits]
        exit_code, output = self.run_python(name, *command)
        records = {}
        for path in out.glob("*/records.jsonl"):
            self.runs.append(path.parent)
            for text in path.read_text().splitlines():
                record = json.loads(text)
                records[record["case"]["id"], record["repetition"]] = record
        line = summarize_records(name, list(records.values()), exit_code, output)
        return list(records.values()), line

    def find_value(self, name: str) -> float | None:
        for line in self.lines:
            if line.name == name:
                return line.value
        return None

    def write(self) -> None:
        """Write the results so far, so that an interrupted script leaves them."""
        (self.folder / "summary.txt").write_text(
            "".join(f"{line.text}\n" for line in self.lines)
        )
        with (self.folder / "records.jsonl").open("w") as file:
            for run in self.runs:
                file.write((run / "records.jsonl").read_text())
        archive = self.folder / "everything.tar.gz"
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            tar.add(self.work, arcname="one_gpu")


def stop_process(process: "subprocess.Popen[bytes]") -> None:
    """End the process group of a process that still runs: first SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, number)
                process.wait(5)


def summarize_records(
    name: str, records: list[Record], exit_code: int | None, output: str
) -> Line:
    """Return a line that passes if a case is ok and every other one is ok or skipped."""
    counts = Counter(record["status"] for record in records)
    figure = ", ".join(f"{count} {status}" for status, count in counts.items())
    figure = figure or last_line(output)
    num_late = sum("out of time" in (record["reason"] or "") for record in records)
    if num_late:
        figure += f" ({num_late} for lack of time)"
    failed = [record for record in records if record["status"] not in ("ok", "skipped")]
    if failed:
        figure += f"; {label_case(failed[0])}: {failed[0]['reason']}"
    if exit_code is None:
        figure += "; deadline exceeded"
    passed = counts["ok"] > 0 and not failed and exit_code is not None
    return make_line(name, passed, figure)


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:MAX_MESSAGE_CHARACTERS] if lines else "no output"


def label_case(record: Record) -> str:
    params = record["case"]["params"]
    settings = [f"{name}={value}" for name, value in params.items()]
    return " ".join([record["case"]["name"], *settings])


def find_metric(
    records: Iterable[Record], case: str, name: str, **params: object
) -> float | None:
    """Return a metric of the first ok record of a case with these parameters."""
    for record in records:
        if record["status"] != "ok" or record["case"]["name"] != case:
            continue
        all_params = {**record["case"]["defaults"], **record["case"]["params"]}
        if params.items() <= all_params.items() and name in record["metrics"]:
            return float(record["metrics"][name]["value"])
    return None


def compare_with_bare_loop(
    session: Session, name: str, seconds: float | None, bare_name: str, max_ratio: float
) -> Line:
    """Compare a time with that of a bare loop; the ratio may be 0.8 to ``max_ratio``."""
    bare_seconds = session.find_value(bare_name)
    if seconds is None or bare_seconds is None:
        return Line(name, "skip", f"parbench {seconds}, bare {bare_seconds}: one is unknown")
    ratio = seconds / bare_seconds
    figure = f"{seconds * 1e6:.2f} us, bare {bare_seconds * 1e6:.2f} us: ratio {ratio:.3f}"
    return make_line(name, session.rehearse or 0.8 <= ratio <= max_ratio, figure)


def query_nvidia_smi(fields: str) -> str:
    """Return the values of fields of nvidia-smi; raises OSError or SubprocessError."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return completed.stdout.strip()


DEVICE_SCRIPT = """
import torch
gpu = torch.cuda.is_available()
name = torch.cuda.get_device_name() if gpu else "no GPU"
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpu else "-"
print(f"{name}, torch {torch.__version__}, NCCL {nccl}")
"""


def machine(session: Session) -> Iterator[Line]:
    """Report what the machine is."""
    _, output = session.run_python("torch", "-c", DEVICE_SCRIPT)
    yield Line("machine", "pass", f"{last_line(output)}, Python {platform.python_version()}")
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,memory.total,memory.used"
    with suppress(OSError, subprocess.SubprocessError):
        yield Line("nvidia-smi", "pass", query_nvidia_smi(f"{fields},mig.mode.current"))
    exit_code, output = session.run_python("doctor", "-m", "parbench", "doctor")
    figure = f"exit code {exit_code}, {len(output.splitlines())} lines"
    yield make_line("doctor", exit_code in (0, 1), figure)


def reference(session: Session) -> Iterator[Line]:
    """Measure bare loops; their results are known as far as the program came."""
    program = [str(GPU_TESTS / "bare_loops.py")]
    if session.rehearse:
        program.append("--rehearse")
    exit_code, output = session.run_python("reference", *program)
    for text in output.splitlines():
        if text.startswith('{"name"'):
            yield Line(**json.loads(text))
    if exit_code != 0:
        yield Line("reference", "fail", last_line(output))


def marked(session: Session) -> Iterator[Line]:
    """Run the tests marked gpu except those of hangs; a rehearsal only imports them."""
    yield from run_gpu_tests(session, "tests/gpu", f"--ignore={HANG_TESTS}")


def hangs(session: Session) -> Iterator[Line]:
    yield from run_gpu_tests(session, HANG_TESTS)


def run_gpu_tests(session: Session, *paths: str) -> Iterator[Line]:
    options = ["-p", "no:cacheprovider", "-W", "default", "--tb=short", "-v", "-m", "gpu"]
    name = f"pytest {Path(paths[0]).name}"
    exit_code, output = session.run_python(name, "-m", "pytest", *options, *paths)
    pattern = r"^(tests/gpu/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|RERUN)"
    verdicts = dict(re.findall(pattern, output, re.MULTILINE))
    counts = Counter(verdicts.values())
    figure = ", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items())
    figure = figure or last_line(output)
    if exit_code is None:
        figure += "; deadline exceeded"
    expected_code = NO_TESTS_COLLECTED if session.rehearse else 0
    title = f"tests marked gpu: {' '.join(paths)}"
    yield make_line(title, exit_code == expected_code, figure)
    for test, verdict in verdicts.items():
        if verdict in ("FAILED", "ERROR"):
            yield Line(f"  {test.removeprefix('tests/gpu/')}", "fail", verdict.lower())


def one_rank(session: Session) -> Iterator[Line]:
    """Run every collective in every mode at a small and a large size."""
    modes = "mode=blocking,pipelined,async,graph"
    selection = ["collective.*", "--sizes", "1K,256M", "--set", modes]
    records, line = session.run_parbench(
        "collectives", *session.one_rank_options, *selection, budget=30
    )
    yield line
    # A graph of the all-reduce is empty on one rank, so that its ratio says nothing.
    for mode, name in (
        ("blocking", "all_reduce"),
        ("blocking", "all_gather"),
        ("graph", "all_gather"),
    ):
        seconds = find_metric(records, f"collective.{name}", "time", size_bytes=1024, mode=mode)
        title = f"{mode} {name} of 1K"
        yield compare_with_bare_loop(
            session, title, seconds, f"bare {title}, one rank", max_ratio=1.25
        )


def every_type(session: Session) -> Iterator[Line]:
    """Run every collective in every type at 1K and 256M, and every reduction at 1K."""
    types = ["float32", "bfloat16", "int8", "float64", "float16", "int64", "int32", "uint8"]
    types += ["float8_e4m3fn", "float8_e5m2"]
    settings = f'size_bytes = ["1K", "256M"], dtype = {types}'
    cases = [f'[[case]]\nname = "collective.*"\nset = {{ {settings} }}']
    for name in ("all_reduce", "reduce_scatter"):
        settings = f'size_bytes = "1K", dtype = {types}, redop = ["min", "max", "product"]'
        cases.append(f'[[case]]\nname = "{name}"\nset = {{ {settings} }}')
    plan = session.work / "types.toml"
    plan.write_text("\n".join(cases))
    options = [*session.one_rank_options, "--cases", str(plan)]
    _, line = session.run_parbench("types", *options, budget=25)
    yield line


def memory(session: Session) -> Iterator[Line]:
    """Measure the bandwidth of memory copies and the FLOP/s of GEMMs."""
    selection = "memory.copy compute.gemm --sizes 1G --set m=512,4096"
    options = [*session.one_rank_options, *selection.split()]
    records, line = session.run_parbench("memory and GEMMs", *options, budget=8)
    yield line
    bandwidth = find_metric(records, "memory.copy", "algbw")
    if bandwidth is None:
        return
    # A copy reads and writes every byte.
    ratio = 2 * bandwidth / H200_COPY_BYTES_PER_SECOND
    is_h200 = "H200" in session.lines[0].figure
    figure = f"{2 * bandwidth / 1e12:.3f} TB/s read and written, {ratio:.3f} of an H200"
    yield make_line("memory.copy", not is_h200 or abs(ratio - 1) <= 0.1, figure)


def health(session: Session) -> Iterator[Line]:
    """Check the GPU: correct results and the health that its driver reports."""
    num_ranks = "2" if session.rehearse else "1"
    budget = "8s" if session.rehearse else "25s"
    options = ["--device", session.device, "--nproc", num_ranks, "--budget", budget]
    out = str(session.work / "check")
    exit_code, output = session.run_python(
        "check", "-m", "parbench", "check", *options, "--out", out, "--format=json"
    )
    report: Record = {}
    for text in output.splitlines():
        if text.startswith('{"verdict"'):
            report = json.loads(text)
    rates = []
    for device in report.get("devices", ())[:1]:
        for name, rate in device["rates"].items():
            rates.append(f"{name} {rate['value']:.3g} {rate['unit']}")
    figure = f"{report.get('verdict')}: {', '.join(rates) or last_line(output)}"
    # On cores that other processes use, any verdict is possible.
    passed = exit_code == 0 or (session.rehearse and bool(rates))
    yield make_line("check", passed, figure)


def llama(session: Session) -> Iterator[Line]:
    """Train a Llama-shaped step of the size of the bare one."""
    settings = ["shape=tiny-llama"]
    if not session.rehearse:
        settings = ["shape=small-llama", "layers=8", "hidden=2048", "heads=16", "kv_heads=8"]
        settings += ["ffn=5632", "sequence=2048", "vocabulary=32000"]
    settings += ["precision=bfloat16", "microbatch=4"]
    options = [*session.one_rank_options, "ddp"]
    for setting in settings:
        options += ["--set", setting]
    records, line = session.run_parbench("llama-shaped step", *options, budget=20)
    yield line
    seconds = find_metric(records, "workload.ddp", "step_time")
    yield compare_with_bare_loop(
        session, "llama-shaped step", seconds, "bare llama-shaped step", max_ratio=1.02
    )
    mfu = find_metric(records, "workload.ddp", "mfu")
    if mfu is not None:
        yield Line("MFU of the llama-shaped step", "pass", f"{mfu:.1%}")


def steps(session: Session) -> Iterator[Line]:
    settings = "workload.* --set shape=small-llama --set precision=bfloat16"
    options = [*session.one_rank_options, *settings.split()]
    _, line = session.run_parbench("steps that compute", *options, budget=55)
    yield line


def on_gloo(session: Session) -> Iterator[Line]:
    """Run with two ranks what gloo carries between CUDA tensors; the rest is refused."""
    modes = "mode=blocking,pipelined,async"
    selection = ["collective.*", "--sizes", "1K,16M", "--set", modes]
    options = session.two_ranks_options
    _, line = session.run_parbench(
        "gloo: collectives, 2 ranks", *options, *selection, budget=15
    )
    yield line
    selection = ["ddp*", "zero1", "ep_dispatch", "--set", "shape=tiny"]
    _, line = session.run_parbench("gloo: steps, 2 ranks", *options, *selection, budget=20)
    yield line
    for name, selected in (
        ("p2p", "sendrecv --sizes 1K"),
        ("fsdp", "fsdp"),
    ):
        args = ["-m", "parbench", "run", *options, *selected.split()]
        exit_code, output = session.run_python(f"refusal of {name}", *args)
        passed = exit_code == 2 and "gloo" in output
        yield make_line(f"gloo: {name} is refused", passed, last_line(output))


def page(session: Session) -> Iterator[Line]:
    """Write a report of all runs."""
    runs = [str(run) for run in session.runs]
    target = session.folder / "report.html"
    exit_code, output = session.run_python(
        "page", "-m", "parbench", "report", *runs, "-o", str(target)
    )
    figure = last_line(output)
    if exit_code == 0:
        figure = f"{target.stat().st_size / 1e6:.1f} MB"
    yield make_line("report of all runs", exit_code == 0, figure)


@dataclass(frozen=True)
class Part:
    """A part of the script and the seconds after which it is stopped."""

    name: str
    run: Callable[[Session], Iterator[Line]]
    seconds: float


def make_part(run: Callable[[Session], Iterator[Line]], seconds: float) -> Part:
    return Part(run.__name__, run, seconds)


PARTS = (
    make_part(machine, 40),
    make_part(reference, 70),
    make_part(one_rank, 75),
    make_part(memory, 35),
    make_part(health, 60),
    make_part(llama, 60),
    make_part(marked, 140),
    make_part(steps, 85),
    make_part(on_gloo, 90),
    make_part(hangs, 160),
    make_part(every_type, 60),
    make_part(page, 30),
)
"""In the order of their value."""
NOT_REHEARSED = (one_rank, memory, every_type, steps, on_gloo, hangs)
"""A rehearsal on a CPU leaves these parts out: tests check their plans, or a part is like them."""


def unpack_wheels(site: Path) -> list[str]:
    """Unpack the wheels of packages that this Python lacks and return their names."""
    names = []
    for wheel in sorted((GPU_TESTS / "wheels").glob("*.whl")):
        name = wheel.name.partition("-")[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            zipfile.ZipFile(wheel).extractall(site)
            names.append(name)
    return names


def run_part(part: Part, session: Session) -> Iterator[Line]:
    """Yield the lines of a part, and a line for an exception: the other parts still run."""
    if session.deadline - time.monotonic() < MIN_PART_SECONDS:
        yield Line(part.name, "skip", "no time remained")
        return
    try:
        yield from part.run(session)
    except Exception as error:  # noqa: BLE001 - any exception is a result
        yield Line(part.name, "fail", f"{type(error).__name__}: {error}")


def run_parts(session: Session, names: list[str]) -> Line:
    """Run the named parts and return the line that summarizes all."""
    start = time.monotonic()
    slowdown = REHEARSAL_SLOWDOWN if session.rehearse else 1
    for part in PARTS:
        if part.name not in names or (session.rehearse and part.run in NOT_REHEARSED):
            continue
        part_deadline = time.monotonic() + slowdown * part.seconds
        session.deadline = min(part_deadline, start + slowdown * TOTAL_SECONDS)
        for line in run_part(part, session):
            session.lines.append(line)
            print(f"{time.monotonic() - start:5.0f} s  {line.text}", flush=True)
        session.write()
    counts = Counter(line.verdict for line in session.lines)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    verb = "rehearsed" if session.rehearse else "ended"
    figure = f"{verb} after {time.monotonic() - start:.0f} s: {verdicts}"
    return make_line("all", not counts["fail"], figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--rehearse", action="store_true", help="small sizes on a CPU with gloo"
    )
    parser.add_argument("--only", metavar="PART,...", help=f"some of {', '.join(names)}")
    default_folder = f"one_gpu-{time.strftime('%Y%m%dT%H%M%S')}"
    parser.add_argument("folder", nargs="?", default=default_folder)
    options = parser.parse_args()
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        session = Session(folder, Path(scratch) / "work", options.rehearse)
        (session.work / "logs").mkdir(parents=True)
        unpacked = unpack_wheels(site)
        folders = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        if options.rehearse:
            # Threads on cores that other processes use wait for each other.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        print(f"{folder}: unpacked {', '.join(unpacked) or 'nothing'}", flush=True)
        result = run_parts(session, options.only.split(",") if options.only else names)
        session.lines.append(result)
        session.write()
    print(result.text)
    return int(result.verdict == "fail")


if __name__ == "__main__":
    sys.exit(main())
