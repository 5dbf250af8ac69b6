"""Timing on a CUDA device, from a start line in its own queue: no duration holds a launch or a barrier's exit."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parbench.bench.world.torch_compat import spin
from parbench.bench.world.world import World

HOST_NS = 20_000
"""How late the host may see that the device is done: arrivals and exits on it are no better than that."""
_CYCLES_PER_NS = 2  # as fast as GPUs' clocks go; a slower one spins longer
_MARGIN_NS = 20_000
_LONGEST_NS = {False: 500_000, True: 5_000_000}  # of one step, whose launch is else too long to hide; of many
Stamped = tuple[int, int, int, int, int]


class Device:
    """What is asked of a rank's device: all of it goes into one queue, the current stream."""

    def __init__(self, world: World) -> None:
        self._world, self._token = world, torch.zeros(1, device=world.device)

    def spin(self, ns: int) -> None:
        """Keep the device busy for about so long, at its highest clock."""
        spin(_CYCLES_PER_NS * ns)

    def meet(self) -> None:
        """Hold the queue until all ranks' are as far; gloo's collectives meet on the host, where all just met."""
        if self._world.backend != "gloo":
            dist.all_reduce(self._token, group=self._world.group)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def sync(self) -> None:
        self._world.sync_stream()


class DeviceTimer:
    """Times samples by events, and reports for each whether its launch was done before the device began it.

    Where the launch is looked at itself, ``apart``, or takes too long, as a training step's, it is not hidden: the host
    waits at the start line, too, and the duration begins with the launch.
    """

    def __init__(self, device: Device, *, apart: bool) -> None:
        self._device, self._apart = device, apart
        self._launch_ns: dict[int, int] = {}  # the shortest seen, by the number of steps

    def line(self, steps: int, *, late: bool = False) -> None:
        """Queue the start line: a spin, behind which the host can launch all, then a collective that ends together.

        Who is to be ``late`` waits until the others are off.
        """
        longest = _LONGEST_NS[steps > 1]
        wanted = 2 * self._launch_ns[steps] + _MARGIN_NS if steps in self._launch_ns else longest
        if hide := not self._apart and wanted <= longest:
            self._device.spin(wanted)
        self._device.meet()
        if late or not hide:
            self._device.sync()

    def timed(self, sample: Callable[[], int | None], steps: int) -> Stamped:
        """Return arrival, exit, duration and time to issue in ns, and 1 if the launch was hidden, otherwise 0.

        Arrival is when the device began.
        """
        start, end = self._device.event(), self._device.event()
        began = time.perf_counter_ns()
        start.record()
        issued = sample()
        end.record()
        launch = time.perf_counter_ns() - began
        hidden = not start.query()  # type: ignore[no-untyped-call]
        end.synchronize()  # not the device, which may have a load beside this
        done = time.perf_counter_ns()
        self._launch_ns[steps] = min(launch, self._launch_ns.get(steps, launch))
        duration = int(start.elapsed_time(end) * 1e6)
        return done - duration, done, duration, issued - began if issued else 0, int(hidden)
