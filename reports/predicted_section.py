"""The report on predictions: what ``parbench plan --validate`` wrote beside a run, as a table."""

from dataclasses import dataclass

import msgspec

from reports import cells
from reports.columns import Column, words
from reports.findings import Findings
from reports.panels import Panel, Section

PLAN = "plan.json"
_SCHEMA = 1


class _Component(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    predicted: float
    measured: float | None
    unit: str


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    components: list[_Component]
    rule: str = ""
    compute: str = "measured"
    notes: list[str] = []


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A number that others published, as quoted and as the planner has it; ``unit`` is empty for a share."""

    name: str
    quoted: float
    predicted: float
    unit: str
    source: str


class _Validation(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    run: str = ""
    fits: str = ""
    rows: list[_Step]
    left_out: dict[str, str] = {}
    published: list[Claim] = []


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One number of a step as predicted and as measured; ``error`` is predicted over measured, less 1."""

    step: str
    name: str
    predicted: float
    measured: float | None
    unit: str

    @property
    def error(self) -> float | None:
        """None where nothing was measured, or nothing is to be sent."""
        return self.predicted / self.measured - 1 if self.measured else None


def predicted_section(found: Findings) -> Section | None:
    """Return the run's predictions beside what it measured, None where nobody has asked for them."""
    file = found.run.path / PLAN
    try:
        told = msgspec.json.decode(file.read_bytes(), type=_Validation)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        return _untold(f"{PLAN} is not what parbench plan --validate wrote ({error}): have it written again.")
    if told.schema > _SCHEMA:
        return _untold(f"{PLAN} has schema {told.schema}, newer than {_SCHEMA}, the newest this parbench reads.")
    return _told(told)


def _untold(why: str) -> Section:
    return Section(id="predicted", title="Predictions", panels=(), notes=(why,))


def _told(told: _Validation) -> Section:
    rows = tuple(
        Prediction(step=step.label, name=one.name, predicted=one.predicted, measured=one.measured, unit=one.unit)
        for step in told.rows
        for one in step.components
    )
    said = ((step.label, note) for step in told.rows for note in (step.rule, *step.notes))
    notes = dict.fromkeys(f"{label}: {note}" for label, note in said if note)
    left = [f"Not predicted: {label}: {reason}" for label, reason in told.left_out.items()]
    if not rows and not told.published:
        return Section(id="predicted", title="Predictions", panels=(), notes=tuple(left))
    checked = Panel(
        id="predictions",
        title="Predicted and measured",
        caption=f"from {_sources(told)}; parbench plan --validate wrote it",
        columns=_COLUMNS,
        rows=rows,
        notes=(f"Predicted from {_sources(told)}.", *notes, *left),
    )
    panels = (*((checked,) if rows else ()), *((_published(told.published),) if told.published else ()))
    return Section(id="predicted", title="Predictions", panels=panels, notes=() if rows else tuple(left))


def _sources(told: _Validation) -> str:
    """Return what the predictions are made of, for people."""
    links = "the run's own collectives" if told.fits == told.run else f"the collectives of {told.fits}"
    return f"{links} and each step's {' or '.join(dict.fromkeys(step.compute for step in told.rows))} compute"


def _published(claims: list[Claim]) -> Panel[Claim]:
    return Panel(
        id="published",
        title="Published and predicted",
        caption="predicted for declared hardware, not for this machine: datasheets and assumed efficiencies; the shape "
        "must come out, not the digit",
        columns=_PUBLISHED,
        rows=tuple(claims),
        notes=(),
    )


def _quantity(value: float | None, unit: str) -> str:
    return cells.duration(value) if unit == "s" else cells.quantity(value, unit)


_COLUMNS: tuple[Column[Prediction], ...] = (
    words("step", lambda one: one.step, "the training step"),
    words("component", lambda one: one.name, "what is predicted of it"),
    Column(
        title="predicted",
        text=lambda one: _quantity(one.predicted, one.unit),
        sort=lambda one: one.predicted,
        help="from latency and bandwidth of measured curves, closed forms of bytes and memory, and the step's compute",
    ),
    Column(
        title="measured",
        text=lambda one: _quantity(one.measured, one.unit),
        sort=lambda one: one.measured,
        help="the median over launches",
    ),
    Column(
        title="error",
        text=lambda one: "-" if one.error is None else f"{one.error:+.1%}",
        sort=lambda one: one.error,
        help="predicted / measured - 1",
    ),
)


def _figure(value: float, unit: str) -> str:
    return f"{cells.significant(value)} {unit}" if unit else f"{value:.4f}"


_PUBLISHED: tuple[Column[Claim], ...] = (
    words("published", lambda one: one.name, "what was published, and of what"),
    words("source", lambda one: one.source, "who published it", 1),
    Column(
        title="quoted",
        text=lambda one: _figure(one.quoted, one.unit),
        sort=lambda one: one.quoted,
        help="the number as published",
    ),
    Column(
        title="predicted",
        text=lambda one: _figure(one.predicted, one.unit),
        sort=lambda one: one.predicted,
        help="by the planner, from closed forms, simulation and declared hardware",
    ),
)
