"""What training on so many tokens takes: steps, GPU-hours, days, energy. Pure."""

import re
from dataclasses import dataclass

from parbench.bench.text import UserError
from parbench.workloads.planner.dry_run import DryRun

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_tokens(text: str) -> float:
    """Return the tokens meant by ``15T``, ``300B`` or a plain number, above zero."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([KMBT]?)", text.strip().upper(), re.ASCII)
    tokens = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if tokens <= 0:
        raise UserError(f"--tokens {text!r} is not understood: write a number above 0 with K, M, B or T, such as 15T")
    return tokens


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A step taken until so many tokens were seen; ``energy_joules`` is that of the GPUs' boards alone."""

    run: DryRun
    tokens: float

    @property
    def steps(self) -> float:
        return self.tokens / self.run.spec.tokens

    @property
    def seconds(self) -> float:
        return self.steps * self.run.seconds

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.run.spec.world / 3600

    @property
    def energy_joules(self) -> float | None:
        watts = self.run.hardware.watts
        return self.gpu_hours * 3600 * watts if watts else None

    @property
    def words(self) -> str:
        spec, watts = self.run.spec, self.run.hardware.watts
        energy = f"the energy is not known without watts of {self.run.hardware.name}"
        if self.energy_joules is not None:
            energy = f"{self.energy_joules / 3.6e9:,.4g} MWh at the board's {watts:g} W all the time"
        return (
            f"{self.tokens / 1e12:.4g} T tokens: {self.steps:,.0f} steps of {spec.tokens / 1e6:.4g} M tokens, "
            f"{self.gpu_hours:,.4g} GPU-hours, {self.seconds / 86400:,.4g} days on {spec.world} GPUs, {energy}; "
            "assuming no restart, checkpoint or evaluation, and neither hosts, switches nor cooling"
        )

    @property
    def as_json(self) -> dict[str, float | None]:
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "gpu_hours": self.gpu_hours,
            "days": self.seconds / 86400,
            "energy_joules": self.energy_joules,
        }
