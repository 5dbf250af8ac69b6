"""The ``parbench run`` commands that findings suggest, to measure a problem again."""

import shlex
from collections.abc import Mapping, Sequence

from parbench.bench.plan.cases import Case
from parbench.bench.results.runs import Run

STEP_DEFAULTS: Mapping[str, object] = {
    "shape": "tiny",
    "microbatch": 4,
    "bucket_mb": 0.0,
    "schedule": "1f1b",
    "ep": 0,
    "experts": 8,
    "top_k": 2,
    "capacity": 0.0,
    "variant": "all_to_all",
    "cp_method": "ring",
}
"""The default values of parameters of training steps, which a command need not set."""


def build_command(arguments: Sequence[str], settings: Mapping[str, object]) -> str:
    """Return ``parbench run`` with arguments, and ``--set NAME=VALUE`` for each setting.

    A tuple as value becomes several values separated by commas, which are compared.
    """
    words = ["parbench", "run", *arguments]
    for name, value in settings.items():
        words += ["--set", f"{name}={_format_setting(value)}"]
    return shlex.join(words)


def build_preset_command(preset: str, **settings: object) -> str:
    """Return the ``parbench run`` command of a preset with settings, empty for an empty preset."""
    return build_command([preset], settings) if preset else ""


def build_case_command(
    case: Case,
    run: Run,
    *,
    sizes: str,
    operations: Sequence[str] = (),
    without: Sequence[str] = (),
    repetitions: int = 0,
) -> str:
    """Return the ``parbench run`` command that measures a communication case again.

    ``sizes`` is the value of ``--sizes``. ``operations`` replace the operation of the case.
    Parameters in ``without`` are left out. ``repetitions`` is 0 for the default number. ``run`` is
    the run of the case.
    """
    names = operations or (case.short_name,)
    arguments = [*names, "--sizes", sizes, *_list_rank_options(run)]
    if repetitions:
        arguments += ["--repetitions", str(repetitions)]
    omitted = {"size_bytes", *without}
    settings = {name: value for name, value in case.params.items() if name not in omitted}
    return build_command(arguments, settings)


def build_step_command(case: Case, run: Run, preset: str, **settings: object) -> str:
    """Return the ``parbench run`` command that measures a case's training step with other settings.

    It is empty if a custom step lacks a setting, or if the run already contains a case that differs
    only in the settings. ``preset`` is not used, because the step itself can be measured again.
    """
    if case.is_custom and not settings.keys() <= case.all_params.keys():
        return ""
    ignored = dict.fromkeys(settings)
    for other in run.info.plan.cases:
        is_similar = {**other.all_params, **ignored} == {**case.all_params, **ignored}
        if other.id != case.id and other.name == case.name and is_similar:
            return ""
    params = {
        name: value for name, value in case.params.items() if STEP_DEFAULTS.get(name) != value
    }
    name = case.target if case.is_custom else case.short_name
    return build_command([name, *_list_rank_options(run)], params | settings)


def _list_rank_options(run: Run) -> list[str]:
    """Return ``--nproc`` and the run's number of ranks, empty on GPUs or if that is the default."""
    plan = run.info.plan
    process = (run.info.environment or {}).get("process") or {}
    cores = process.get("cores") or plan.nproc
    if plan.device != "cpu" or plan.nproc == max(2, min(8, cores)):
        return []
    return ["--nproc", str(plan.nproc)]


def _format_setting(value: object) -> str:
    """Return a value as text for ``--set``. Values of a tuple are separated by commas."""
    if isinstance(value, tuple):
        return ",".join(map(_format_setting, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
