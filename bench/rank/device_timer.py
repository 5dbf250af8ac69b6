"""Timing on a CUDA device, from a start line in its own queue: no launch counts as duration."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parbench.bench.machine.machine import count_available_cores
from parbench.bench.world import accelerator
from parbench.bench.world.world import World

HOST_NS = 20_000
"""The uncertainty of arrivals and exits in ns, because the host stamps the exit of a device."""
_MIN_CORES_TO_SPIN = 3
_CYCLES_PER_NS = 2  # an upper limit of the clock of GPUs: on a slower clock a spin lasts longer
_MARGIN_NS = 20_000
_MAX_SPIN_NS = 500_000
_MAX_SPIN_OF_MANY_STEPS_NS = 5_000_000

Stamp = tuple[int, int, int, int, int]
"""Arrival, exit, duration and time to issue in ns, and 1 if the launch was hidden, otherwise 0."""


class DeviceQueue:
    """The current stream of a rank's device, into which all calls put work."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._token = torch.zeros(1, device=world.device)
        self._has_few_cores = count_available_cores() < _MIN_CORES_TO_SPIN

    def spin(self, duration_ns: int) -> None:
        """Keep the device busy for at least ``duration_ns``."""
        accelerator.spin(_CYCLES_PER_NS * duration_ns)

    def queue_barrier(self) -> None:
        """Let the stream wait until the streams of all ranks have arrived here.

        gloo needs no such barrier: its collectives run on the host, where all ranks have just met.
        """
        if self._world.backend != "gloo":
            dist.all_reduce(self._token, group=self._world.group)

    def event(self) -> accelerator.Event:
        """Return a new event that records a time.

        A rank with few cores sleeps while it waits, because NCCL's threads need a core too.
        """
        return accelerator.make_event(blocking=self._has_few_cores)

    def sync(self) -> None:
        """Wait for the work on the stream."""
        self._world.sync_stream()


class DeviceTimer:
    """Times samples with CUDA events, behind a spin that hides the launch of their work.

    The spin lasts while the host queues the start line and launches the steps. If a launch outlasts
    its spin, the next spins are longer. A launch is not hidden if its own time is measured
    (``times_issue``), or if it takes too long, as that of a training step. Then the host waits at
    the start line, and the duration includes the launch.
    """

    def __init__(self, device: DeviceQueue, *, times_issue: bool) -> None:
        self._device = device
        self._times_issue = times_issue
        # The least time of the host that a spin must hide, and the margin, by number of steps.
        self._least_host_ns: dict[int, int] = {}
        self._margins_ns: dict[int, int] = {}
        self._start_line_ns = 0  # the time in which the host queues a start line
        self._least_launch_ns: int | None = None  # the least launch time of a single step
        self._is_behind_spin = False

    def queue_start_line(self, steps: int, *, is_late: bool = False) -> None:
        """Queue a spin and then a collective, which ends on all ranks at the same time.

        The host launches ``steps`` steps during the spin. A late rank waits on the host for the end
        of the collective.
        """
        spin_ns = None if self._times_issue else self._find_spin_ns(steps)
        begin_ns = time.perf_counter_ns()
        if spin_ns is not None:
            self._device.spin(spin_ns)
        self._device.queue_barrier()
        self._start_line_ns = time.perf_counter_ns() - begin_ns
        self._is_behind_spin = spin_ns is not None and not is_late
        if not self._is_behind_spin:
            self._device.sync()

    def _find_spin_ns(self, steps: int) -> int | None:
        """Return the time to spin in nanoseconds so that the launch of ``steps`` steps is hidden.

        None if the launch is too long to hide.
        """
        max_spin_ns = _MAX_SPIN_OF_MANY_STEPS_NS if steps > 1 else _MAX_SPIN_NS
        if steps not in self._least_host_ns:
            return max_spin_ns
        needed_ns = 2 * self._least_host_ns[steps]
        if needed_ns + _MARGIN_NS > max_spin_ns:
            return None
        return min(needed_ns + self._margins_ns.get(steps, _MARGIN_NS), max_spin_ns)

    def count_hideable_steps(self) -> int:
        """Return the number of steps whose launch the longest spin hides, at least 1."""
        free_ns = (_MAX_SPIN_OF_MANY_STEPS_NS - _MARGIN_NS) // 2 - self._start_line_ns
        return max(free_ns // max(self._least_launch_ns or 1, 1), 1)

    def measure(self, sampler: Callable[[], int | None], steps: int) -> Stamp:
        """Time one sample and return its stamp.

        Its arrival is the time at which the device began it.
        """
        start = self._device.event()
        end = self._device.event()
        begin_ns = time.perf_counter_ns()
        start.record()
        issued_ns = sampler()
        end.record()
        launch_ns = time.perf_counter_ns() - begin_ns
        is_hidden = not start.query()  # type: ignore[no-untyped-call]
        end.synchronize()  # not the device, which may run a background load
        exit_ns = time.perf_counter_ns()
        if steps == 1:
            self._least_launch_ns = min(launch_ns, self._least_launch_ns or launch_ns)
        host_ns = self._start_line_ns + launch_ns
        self._least_host_ns[steps] = min(host_ns, self._least_host_ns.get(steps, host_ns))
        if self._is_behind_spin and not is_hidden:
            self._margins_ns[steps] = 2 * self._margins_ns.get(steps, _MARGIN_NS)
        duration_ns = int(start.elapsed_time(end) * 1e6)
        issue_ns = issued_ns - begin_ns if issued_ns else 0
        return exit_ns - duration_ns, exit_ns, duration_ns, issue_ns, int(is_hidden)
