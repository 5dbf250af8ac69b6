"""``parbench compare``: from two words to a comparison in the form asked for, and its exit code."""

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench.results.runs import Run, load_run
from bench.text import UserError
from reports.comparing.compare import Comparison, compare
from reports.comparing.compare_formats import as_json, as_junit, as_markdown, as_table
from reports.comparing.compare_rule import Rule
from reports.comparing.confirm import Confirming, confirm
from reports.comparing.history_select import means_run, notes_of_pools, select_run
from reports.comparing.noise_floor import FILE, Floor, read_floors


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How to compare: the floor as text, the differences that are meant, the form, and strictness.

    ``floor`` is a percentage, the file of ``parbench aa``, or None for 3 % and the usual file if it is there.
    ``history`` is the file whose runs words such as ``main~1`` mean; ``confirming`` says how to launch suspects again.
    """

    floor: str | None = None
    across: tuple[str, ...] = ()
    form: str = "table"
    fail_on_unknown: bool = False
    history: Path | None = None
    confirming: Confirming | None = None


def compare_runs(base: str, new: str, asked: Asked) -> tuple[str, int]:
    """Return the comparison of two runs as text, and the exit code; ``UserError`` if they cannot be compared."""
    newer = find_run(new, asked.history)
    runs = find_run(base, asked.history, without=newer.info.id), newer
    if runs[0].path.resolve() == runs[1].path.resolve():
        raise UserError(f"BASE and NEW are the same run, {runs[0].path}: name two runs")
    floor, floors = find_floor(asked.floor)
    comparison = compare(*runs, Rule(floor=floor), asked.across, floors)
    comparison = replace(comparison, notes=notes_of_pools(runs))
    if asked.confirming is not None:
        comparison = confirm(comparison, asked.confirming, asked.across, floors)
    code = comparison.code(fail_on_unknown=asked.fail_on_unknown)
    return _render(comparison, asked.form, code), code


def find_run(word: str, history: Path | None = None, *, without: str = "") -> Run:
    """Return the run that a word of the command line means: a run's folder, or runs of the history.

    Where a word means several runs, that of the id ``without`` is none of them.
    """
    if history is not None and not Path(word).exists() and (means_run(word) or history.exists()):
        return select_run(history, word, without=without)
    return load_run(Path(word))


def find_floor(text: str | None) -> tuple[float, dict[str, Floor]]:
    """Return the floor as a fraction, and those that were measured, by fingerprint.

    A percentage stands alone; a file of ``parbench aa``, or the usual one where no text is given and it is there,
    stands beside 3 %.
    """
    if text is not None and (text.strip().endswith("%") or not Path(text).exists()):
        return parse_floor(text), {}
    file = FILE if text is None else Path(text)
    return Rule().floor, {} if text is None and not file.exists() else read_floors(file)


def parse_floor(text: str) -> float:
    """Return a floor as a fraction: ``3%`` is 0.03."""
    number, _, rest = text.strip().partition("%")
    try:
        percent = float(number) if "%" in text and not rest else -1.0
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise UserError(f"--floor {text!r} is not understood: write a percentage from 0% to 100%, such as 3%")
    return percent / 100


def _render(comparison: Comparison, form: str, code: int) -> str:
    if form == "json":
        return as_json(comparison, code=code)
    if form == "junit":
        return as_junit(comparison)
    if form == "markdown":
        return as_markdown(comparison)
    return as_table(comparison, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
