"""The ``parbench run`` commands that findings suggest, to measure a problem again."""

import shlex
from collections.abc import Mapping, Sequence

from parbench.bench.plan.cases import Case
from parbench.bench.results.runs import Run


def build_command(arguments: Sequence[str], settings: Mapping[str, object]) -> str:
    """Return ``parbench run`` with arguments, and ``--set NAME=VALUE`` for each setting.

    A tuple becomes several values separated by commas. The run measures and compares all of them.
    """
    words = ["parbench", "run", *arguments]
    for name, value in settings.items():
        words += ["--set", f"{name}={_format_setting(value)}"]
    return shlex.join(words)


def build_preset_command(preset: str, **settings: object) -> str:
    """Return the ``parbench run`` command of a preset with settings, empty for an empty preset."""
    return build_command([preset], settings) if preset else ""


def build_case_command(
    case: Case, run: Run, *, sizes: str, without: Sequence[str] = (), repetitions: int = 0
) -> str:
    """Return the ``parbench run`` command that measures a communication case again.

    Args:
        case: the case.
        run: the run of the case.
        sizes: the value of ``--sizes``.
        without: the names of the parameters of the case that the command does not set.
        repetitions: the number of repetitions, 0 for the default number.
    """
    arguments = [case.short_name, "--sizes", sizes, *_list_rank_options(run)]
    if repetitions:
        arguments += ["--repetitions", str(repetitions)]
    omitted = {"size_bytes", *without}
    settings = {name: value for name, value in case.params.items() if name not in omitted}
    return build_command(arguments, settings)


def build_step_command(case: Case, run: Run, preset: str, **settings: object) -> str:
    """Return the ``parbench run`` command that measures a case's training step with other settings.

    The command is empty if a user-defined step has no parameter for one of the settings. ``preset``
    is not used, because the step itself can be measured again.
    """
    if case.is_custom and not settings.keys() <= case.all_params.keys():
        return ""
    name = case.target if case.is_custom else case.short_name
    return build_command([name, *_list_rank_options(run)], case.params | settings)


def _list_rank_options(run: Run) -> list[str]:
    """Return the arguments ``--nproc`` and number of ranks of a run on CPUs, empty for GPUs."""
    plan = run.info.plan
    return ["--nproc", str(plan.nproc)] if plan.device == "cpu" else []


def _format_setting(value: object) -> str:
    """Return a value as text for ``--set``. Values of a tuple are separated by commas."""
    if isinstance(value, tuple):
        return ",".join(map(_format_setting, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
