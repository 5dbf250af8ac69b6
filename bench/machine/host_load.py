"""The load of a host while the ranks of a repetition measured on it."""

import os
import time

import msgspec
import psutil

from parbench.bench.limits import NonNegative, NumRanks

BUSY_SHARE = 0.25  # of the host's cores: a higher load disturbs
STEAL_PERCENT = 2.0
_BUSY_FIELDS = ("user", "nice", "system", "irq", "softirq")


class HostLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a host during a repetition. None means unknown."""

    cores: NumRanks
    """The number of logical CPUs of the host."""
    one_minute: NonNegative | None = None
    """The load average of the minute before the repetition."""
    other_cores: NonNegative | None = None
    """The mean number of cores that other processes kept busy, unknown if a rank ended early."""
    steal_percent: NonNegative | None = None
    """The share of the cores' time that the hypervisor took, in per cent."""

    @property
    def disturbance(self) -> str:
        """A text about other processes and the hypervisor if they disturbed, otherwise empty."""
        parts = []
        if (self.other_cores or 0.0) > BUSY_SHARE * self.cores:
            parts.append(f"other processes kept {self.other_cores:.1f} of {self.cores} cores busy")
        if (self.steal_percent or 0.0) > STEAL_PERCENT:
            parts.append(f"the hypervisor took {self.steal_percent:.0f} % of the cores' time")
        return " and ".join(parts)


class LoadMeter:
    """Measures the load of this host since the creation of the object, in one thread."""

    def __init__(self) -> None:
        self._one_minute = round(os.getloadavg()[0], 2)
        self._start = time.monotonic()
        psutil.cpu_times_percent()  # The next call refers to the time since this one.

    def read(self, own_seconds: float | None) -> HostLoad:
        """Return the load since the creation of the meter.

        ``own_seconds`` is the CPU time of the ranks, which is subtracted. None means unknown.
        """
        seconds = time.monotonic() - self._start
        percent = psutil.cpu_times_percent()._asdict()
        cores = psutil.cpu_count() or 1
        other_cores = None
        if own_seconds is not None:
            busy_cores = cores * sum(percent.get(name, 0.0) for name in _BUSY_FIELDS) / 100
            other_cores = round(max(busy_cores - own_seconds / seconds, 0.0), 2)
        return HostLoad(
            cores=cores,
            one_minute=self._one_minute,
            other_cores=other_cores,
            steal_percent=percent.get("steal"),
        )
