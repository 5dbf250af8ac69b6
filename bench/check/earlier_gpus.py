"""Missing GPUs: GPUs that an earlier run on this host used and that the host does not have now."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parbench.bench.check.health import Device
from parbench.bench.machine.gpu import Gpu
from parbench.bench.results.runs import Run, list_runs, load_run
from parbench.bench.text import UserError, format_list, strip_domain

_MAX_RUNS = 100  # a check reads only so many of the newest runs


def find_missing_gpus(
    out: Path, host: str, environ: Mapping[str, str], gpus: Sequence[Gpu], num_silent: int
) -> tuple[Device, ...]:
    """Return one device with the verdict ``bad`` if this host had more GPUs than it has now.

    The current GPUs are compared with the GPUs of one earlier run on the same host with the same
    ``CUDA_VISIBLE_DEVICES``: the run that used the most GPUs. GPUs that are present but do not
    answer count among the current ones. The fault of the device states the number of missing GPUs,
    and names the GPUs of the earlier run that do not answer now. The result is empty if there are
    at least as many GPUs as before, also if some were replaced by others.

    Args:
        out: the folder with the folders of earlier runs.
        host: the name of this host without its domain.
        environ: the environment variables, with ``CUDA_VISIBLE_DEVICES``.
        gpus: the GPUs that answer now.
        num_silent: the number of GPUs that are present now but do not answer. ``gpus`` does not
            contain them.
    """
    earlier_uuids: frozenset[str] = frozenset()
    earlier_run = ""
    for run in _load_runs(out, host, environ.get("CUDA_VISIBLE_DEVICES")):
        run_uuids = _list_uuids(run)
        if len(run_uuids) > len(earlier_uuids):
            earlier_uuids = run_uuids
            earlier_run = run.info.id
    num_missing = len(earlier_uuids) - len(gpus) - num_silent
    if num_missing <= 0:
        return ()
    uuids = sorted(earlier_uuids - {gpu.uuid for gpu in gpus})
    text = f"{num_missing} of {format_list(uuids, 'and')}, which run {earlier_run} used"
    fix = "see lspci -d 10de:, dmesg (Xid) and parbench doctor; if it was removed, delete that run"
    return (Device.make_absent(host, "missing GPU", text, fix),)


def _load_runs(out: Path, host: str, visible_devices: str | None) -> Iterator[Run]:
    """Yield earlier runs on ``host`` in the folder ``out``, the newest first.

    Only the newest 100 runs in the folder are read. Only runs whose ``CUDA_VISIBLE_DEVICES`` was
    equal to ``visible_devices`` are yielded, where None means that the variable was not set.
    """
    for path in reversed(list_runs(out)[-_MAX_RUNS:]):
        try:
            run = load_run(path)
        except UserError:
            continue  # Another version wrote it, or it is damaged.
        environment = run.info.environment or {}
        variables = environment.get("variables") or {}
        name = (environment.get("host") or {}).get("name") or ""
        if strip_domain(name) == host and variables.get("CUDA_VISIBLE_DEVICES") == visible_devices:
            yield run


def _list_uuids(run: Run) -> frozenset[str]:
    """Return the UUIDs of the GPUs on which the ranks of a run worked, empty without GPUs.

    They are in ``run.json`` if all ranks used one GPU, and otherwise in the run's first record.
    """
    groups = [run.info.environment or {}]
    for record in run.records[:1]:
        groups += [group for name, group in record.environment.items() if name.startswith("rank ")]
    uuids = [(group.get("gpu") or {}).get("uuid") for group in groups]
    return frozenset(uuid for uuid in uuids if uuid)
