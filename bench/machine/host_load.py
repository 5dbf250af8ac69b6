"""The CPU load of a host while the ranks of one start measure their cases."""

import time

import msgspec
import psutil

from parbench.bench.limits import NonNegative, NumRanks

BUSY_SHARE = 0.25
"""The fraction of the host's cores above which a load of other processes disturbs."""
_STEAL_PERCENT = 2.0
"""The share of CPU time, in per cent, above which the hypervisor disturbs."""
_BUSY_FIELDS = ("user", "nice", "system", "irq", "softirq")


class HostLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU load of a host during one repetition of a run."""

    cores: NumRanks
    """The number of logical CPUs of the host."""
    other_cores: NonNegative
    """The mean number of cores that processes other than the ranks kept busy."""
    steal_percent: NonNegative | None = None
    """The share of the CPU time of all cores that the hypervisor took, in per cent.

    None where the system does not count it.
    """

    @property
    def disturbance(self) -> str:
        """A text about the load that other processes or the hypervisor caused, if it disturbs.

        It disturbs if other processes kept more than 25 % of the cores busy, or if the hypervisor
        took more than 2 % of the CPU time. Otherwise the text is empty.
        """
        parts = []
        if self.other_cores > BUSY_SHARE * self.cores:
            parts.append(f"other processes kept {self.other_cores:.1f} of {self.cores} cores busy")
        if (self.steal_percent or 0.0) > _STEAL_PERCENT:
            parts.append(f"the hypervisor took {self.steal_percent:.0f} % of the cores' time")
        return " and ".join(parts)


class LoadMeter:
    """Measures the CPU load that other processes cause on this host while ranks measure.

    The measurement lasts from the creation of the object until ``read``. ``read`` returns the mean
    number of cores that processes other than the ranks kept busy, and the CPU time that the
    hypervisor took in per cent. Only one meter can measure at a time, and its creation and ``read``
    must be in the same thread, because psutil stores the state.
    """

    def __init__(self) -> None:
        """Start to measure the CPU load of this host."""
        self._start = time.monotonic()
        psutil.cpu_times_percent()  # The next call refers to the time since this one.

    def read(self, own_seconds: float) -> HostLoad:
        """Return the load of this host since the creation of the meter.

        ``own_seconds`` is the CPU time in seconds that all ranks together used since the creation.
        It is subtracted from the busy time of all cores.
        """
        seconds = time.monotonic() - self._start
        percent = psutil.cpu_times_percent()._asdict()
        cores = psutil.cpu_count() or 1
        busy_cores = cores * sum(percent.get(name, 0.0) for name in _BUSY_FIELDS) / 100
        return HostLoad(
            cores=cores,
            other_cores=round(max(busy_cores - own_seconds / seconds, 0.0), 2),
            steal_percent=percent.get("steal"),
        )
