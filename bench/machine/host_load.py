"""What else a host did while the ranks of a launch measured on it."""

import os
import time

import msgspec
import psutil

from parbench.bench.limits import Positive, Ranks
from parbench.bench.machine.machine import try_call

BUSY_SHARE = 0.25  # of the cores: more disturbs
STEAL_PERCENT = 2.0


class HostLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load average before, then means: cores that other processes kept busy, time that the hypervisor took.

    None is unknown: of others where a rank ended early, which tells no more what it took itself.
    """

    cores: Ranks
    one_minute: Positive | None = None
    other_cores: Positive | None = None
    steal_percent: Positive | None = None

    @property
    def disturbance(self) -> str:
        """What disturbed the launch, in words; empty if nothing did."""
        parts = []
        if (self.other_cores or 0.0) > BUSY_SHARE * self.cores:
            parts.append(f"other processes kept {self.other_cores:.1f} of {self.cores} cores busy")
        if (self.steal_percent or 0.0) > STEAL_PERCENT:
            parts.append(f"the hypervisor took {self.steal_percent:.0f} % of the cores' time")
        return " and ".join(parts)


class LoadMeter:
    """Measures this host from now on."""

    def __init__(self) -> None:
        load = try_call(os.getloadavg)
        self._one_minute = None if load is None else round(load[0], 2)
        self._began, self._before = time.monotonic(), psutil.cpu_times()

    def read(self, own_seconds: float | None) -> HostLoad:
        """Return the load until now, beside that of ranks which took so much time of cores."""
        seconds, now = time.monotonic() - self._began, psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._before, name) for name in now._fields}
        cores = psutil.cpu_count() or 1
        busy = sum(spent.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        others = None if own_seconds is None else round(max(busy - own_seconds, 0.0) / seconds, 2)
        steal = round(100 * spent["steal"] / (cores * seconds), 1) if "steal" in spent else None
        return HostLoad(cores=cores, one_minute=self._one_minute, other_cores=others, steal_percent=steal)
