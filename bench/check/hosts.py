"""A check of several hosts, each by itself and at once, over ssh; then their devices beside each other."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import msgspec

from parbench.bench.check.health import FLOORS, Device, Health, compared
from parbench.bench.check.show import complaints_of, devices_table, reasons_of
from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import decode_json, read_text
from parbench.bench.launch.processes import PARBENCH
from parbench.bench.text import UserError, counted, last_line, listed, reading

MORE_SECONDS = 120.0  # for what a check does beside its budget


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a host answered: its check, or why there is none."""

    host: str
    health: Health | None = None
    problem: str = ""


def hosts_in(text: str) -> tuple[str, ...]:
    """Return the hosts of ``a,b``, or of a file with one a line.

    In the hostfiles of MPI libraries the number of ranks follows: ``n1 slots=8`` of Open MPI, ``n1:8`` of MPICH.
    """
    if "," not in text and Path(text).is_file():  # a long list is too long for a file's name
        lines = [line.partition("#")[0].split() for line in read_text(text, f"--hosts {text}").splitlines()]
        found = [re.sub(r"^([^:]+):\d+$", r"\1", words[0]) for words in lines if words]
    else:
        found = [word for word in text.split(",") if word]
    if not found or any(name.startswith("-") for name in found):
        raise UserError(f"--hosts {text!r} names no hosts: write a,b,c, or a file with one a line")
    return tuple(dict.fromkeys(found))


def ask(hosts: Sequence[str], words: Sequence[str], *, agent: str, seconds: float) -> tuple[Answer, ...]:
    """Run ``parbench check`` with these options on every host at once, by the same Python in the same folder."""
    with reading(f"--ssh {agent!r}", "is no command"):
        program, *options = shlex.split(agent)
    there = shlex.join([*PARBENCH, "check", *words, "--json"])
    command = f"cd {shlex.quote(str(Path.cwd()))} && {there}"

    def one(host: str) -> Answer:
        try:
            done = subprocess.run(
                [program, *options, host, command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds + MORE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(host=host, problem=f"no answer within {seconds + MORE_SECONDS:.0f} s")
        except OSError as error:
            return Answer(host=host, problem=f"{program} cannot be started: {error.strerror}")
        return read(host, done.stdout, done.stderr, done.returncode)

    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return tuple(pool.map(one, hosts))


def read(host: str, out: bytes, err: bytes, code: int) -> Answer:
    """Return what a host printed; its last line on stderr where that is no check."""
    try:
        return Answer(host=host, health=decode_json(out.strip().rpartition(b"\n")[2], Health))
    except ValueError:
        return Answer(host=host, problem=last_line(err.decode(errors="replace")) or f"it ended with {code}")


def together(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Compare each device with its peers on all hosts; emulated hosts share one machine and are left as they are."""
    by_kind: dict[str, list[Device]] = {}
    for answer in answers:
        if answer.health is not None and not answer.health.emulated:
            by_kind.setdefault(answer.health.device, []).extend(answer.health.devices)
    compared_devices = {kind: iter(compared(devices, FLOORS[kind])) for kind, devices in by_kind.items()}
    return tuple(_with_devices(answer, compared_devices) for answer in answers)


def _with_devices(answer: Answer, compared_devices: Mapping[str, Iterator[Device]]) -> Answer:
    """Return an answer with the next compared devices of its kind, as many as it has."""
    health = answer.health
    if health is None or health.emulated:
        return answer
    devices = islice(compared_devices[health.device], len(health.devices))
    # The name by which a host was reached is unique. Its own name may be that of another host too.
    named = tuple(msgspec.structs.replace(device, host=answer.host) for device in devices)
    return msgspec.structs.replace(answer, health=msgspec.structs.replace(health, devices=named))


def code_of(answers: Sequence[Answer]) -> ExitCode:
    """Return the exit code of a check of several hosts.

    If some hosts check GPUs and others cores, the latter may have GPUs that nothing has checked.
    """
    codes = [ExitCode.DID_NOT_RUN if answer.health is None else answer.health.code for answer in answers]
    if len(_hosts_by_device(answers)) > 1:
        codes.append(ExitCode.DID_NOT_RUN)
    return combine_exit_codes(codes)


def _hosts_by_device(answers: Sequence[Answer]) -> dict[str, list[str]]:
    hosts: dict[str, list[str]] = {}
    for answer in answers:
        if answer.health is not None:
            hosts.setdefault(answer.health.device, []).append(answer.host)
    return hosts


def render(answers: Sequence[Answer]) -> str:
    """Return a table of all devices, and why hosts and devices are not fine."""
    devices = [device for answer in answers if answer.health for device in answer.health.devices]
    bad = [answer.host for answer in answers if answer.health is not None and answer.health.code == 1]
    silent = [answer for answer in answers if answer.health is None or answer.health.code == 4]
    told = [f"{counted(len(answers), 'host')}: {len(bad)} bad, {len(silent)} did not run"]
    lines = [*told, *(devices_table(devices, with_host=True) if devices else [])]
    by_device = _hosts_by_device(answers)
    if len(by_device) > 1:
        parts = [f"{device} on {','.join(hosts)}" for device, hosts in by_device.items()]
        lines.append(f"hosts differ in what was checked: {listed(parts, 'and')}")
        lines.append("     -> see parbench doctor there; --device cuda or --device cpu checks the same on all")
    for answer in answers:
        if answer.health is None:
            lines.append(f"did not run  {answer.host}: {answer.problem}")
        else:
            health = answer.health
            lines += [f"did not run  {answer.host}: {problem}" for problem in health.problems]
            lines += [f"bad  {answer.host} {link.text}\n     -> {link.remedy}" for link in health.links]
            lines += complaints_of(health.ports, f"{answer.host} ")
    lines += reasons_of(devices, with_host=True)
    if bad:
        lines.append(f"leave out: {','.join(bad)}")
    return "\n".join(lines)
