"""Timing of samples on a CUDA device with events.

The host first queues a spin kernel and a barrier, and then launches the sample behind them. So the
launch from the host does not count as duration.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parbench.bench.world import accelerator
from parbench.bench.world.world import World

HOST_NS = 20_000
"""The uncertainty in ns of the host's times for the start and the end of a sample on a device.

The host notices the end with a delay, and the time of the start is computed from that of the end.
"""
_CYCLES_PER_NS = 2
"""The assumed clock rate of a GPU in cycles per ns, which converts the time of a spin kernel.

It is an upper limit. On a GPU with a slower clock a spin kernel lasts longer than requested.
"""
_MARGIN_NS = 20_000
"""The least time in ns by which a spin kernel lasts longer than twice the time that it hides."""
_MAX_SPIN_NS = 500_000
"""The longest time in ns of a spin kernel before a sample of one step."""
_MAX_SPIN_OF_MANY_STEPS_NS = 5_000_000
"""The longest time in ns of a spin kernel before a sample of several steps."""

Stamp = tuple[int, int, int, int, int]
"""The times of one sample on one rank, as five whole numbers.

They are the arrival (the time at which it began), the exit (the time at which it ended), the
duration and the time until an asynchronous call returned, each in ns. The last number is 1 if the
host had launched the whole sample before the device began it, otherwise 0.
"""


class DeviceTimer:
    """Times samples on a CUDA device with events, without the time of their launch by the host.

    For each sample, three things are queued on the device: a spin kernel, a barrier of all ranks,
    and the steps of the sample between two events. The spin kernel keeps the device busy while the
    host launches the steps. If a launch takes longer than the spin, later spins are longer.

    In two cases the duration includes the launch, because the host waits until the barrier is done
    before it launches the steps:

    - The timer is made without spin kernels.
    - The launch takes longer than the longest spin could hide, for example in a training step.
    """

    def __init__(self, world: World, *, spins: bool = True) -> None:
        """Prepare the timing of samples on the current CUDA stream of the world's device.

        ``spins`` is False for a timer without spin kernels: if the time until an asynchronous call
        returns is measured too, or if a fault delays this rank.
        """
        self._world = world
        self._spins = spins
        self._token = torch.zeros(1, device=world.device)
        self._least_host_ns: dict[int, int] = {}
        """The least time in ns that the host took to queue the barrier and launch a sample.

        The key is the number of steps of the sample.
        """
        self._margin_ns = _MARGIN_NS
        """The time in ns that is added to a spin. It doubles after a launch that was not hidden."""
        self._start_line_ns = 0
        """The time in ns in which the host queued the last spin kernel and barrier."""

    def spin(self, duration_ns: int) -> None:
        """Queue a kernel that keeps the device busy for at least ``duration_ns``."""
        accelerator.spin(_CYCLES_PER_NS * duration_ns)

    def queue_barrier(self) -> None:
        """Queue an all_reduce, so that the streams of all ranks go on from here at the same time.

        With the backend gloo nothing is queued, because gloo's collectives run on the host, where
        all ranks have just passed a barrier.
        """
        if self._world.backend != "gloo":
            dist.all_reduce(self._token, group=self._world.group)

    def queue_start_line(self, steps: int) -> None:
        """Queue a spin kernel and then a barrier, after which all devices begin at the same time.

        The host launches the ``steps`` steps of the sample during the spin. If there is no spin,
        the host waits for the end of the barrier.
        """
        spin_ns = self._find_spin_ns(steps) if self._spins else None
        begin_ns = time.perf_counter_ns()
        if spin_ns is not None:
            self.spin(spin_ns)
        self.queue_barrier()
        self._start_line_ns = time.perf_counter_ns() - begin_ns
        if spin_ns is None:
            self._world.sync_stream()

    def _find_spin_ns(self, steps: int) -> int | None:
        """Return the time in ns of the spin kernel that hides the launch of ``steps`` steps.

        It is twice the least time that the host took so far to queue a barrier and launch a sample
        of so many steps, plus a margin. It is at most 0.5 ms for one step and 5 ms for several
        steps, which is also its value before the first sample. The result is None if the launch
        takes too long to hide.
        """
        max_spin_ns = _MAX_SPIN_OF_MANY_STEPS_NS if steps > 1 else _MAX_SPIN_NS
        if steps not in self._least_host_ns:
            return max_spin_ns
        needed_ns = 2 * self._least_host_ns[steps]
        if needed_ns + _MARGIN_NS > max_spin_ns:
            return None
        return min(needed_ns + self._margin_ns, max_spin_ns)

    def measure(self, sampler: Callable[[], int | None], steps: int) -> Stamp:
        """Take one sample of ``steps`` steps and return its times, see ``Stamp``.

        ``sampler`` launches the steps. The duration is the time between two CUDA events. The exit
        is the time at which the host noticed the end, in ns of ``time.perf_counter_ns()``. The
        arrival is the exit less the duration.
        """
        start = accelerator.make_event()
        end = accelerator.make_event()
        begin_ns = time.perf_counter_ns()
        start.record()
        issued_ns = sampler()
        end.record()
        launch_ns = time.perf_counter_ns() - begin_ns
        is_hidden = not start.query()  # type: ignore[no-untyped-call]
        end.synchronize()  # not the device, which may run a background load
        exit_ns = time.perf_counter_ns()
        host_ns = self._start_line_ns + launch_ns
        self._least_host_ns[steps] = min(host_ns, self._least_host_ns.get(steps, host_ns))
        if not is_hidden:
            self._margin_ns = min(2 * self._margin_ns, _MAX_SPIN_OF_MANY_STEPS_NS)
        duration_ns = int(start.elapsed_time(end) * 1e6)
        issue_ns = issued_ns - begin_ns if issued_ns else 0
        return exit_ns - duration_ns, exit_ns, duration_ns, issue_ns, int(is_hidden)
