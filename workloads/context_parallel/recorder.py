"""What attention over ranks was seen to do while it was looked at: pairs it computed, and time it waited for peers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from workloads.step.probe import Moment, moment, seconds_of

Direction = Literal["forward", "backward"]
Size = tuple[str, tuple[int, ...], torch.dtype]  # what moved, and how large it was


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One communication that attention stood still for: what moved, of this size, in a step of the ring.

    Issued, waited for and ended at these seconds of this rank's clock; ``peers`` are the global ranks that take part.
    """

    direction: str
    step: int
    size: Size
    peers: tuple[int, ...]
    issued: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def num_bytes(self) -> int:
        _, shape, dtype = self.size
        return torch.Size(shape).numel() * dtype.itemsize


class Recorder:
    """Notes what happens within ``recording``; outside it costs nothing. On CUDA the device's clock is read.

    ``moves`` has, by name, what makes each communication again with a tensor like the one that moved.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on = device, False
        self._noted: list[tuple[Wait, tuple[Moment, Moment, Moment]]] = []
        self.uncertainty_seconds = 0.0  # of the waits read last
        self.pairs: Counter[tuple[str, int]] = Counter()
        self.moves: dict[str, Callable[[Tensor], object]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Forget what was noted, and note what comes."""
        self.pairs.clear()
        self._noted.clear()
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def computed(self, direction: Direction, step: int, pairs: int) -> None:
        if self._on:
            self.pairs[direction, step] += pairs

    def issued(self) -> Moment | None:
        """Return when this is called, for ``waiting``; None outside of ``recording``."""
        return moment(self._device) if self._on else None

    @contextmanager
    def waiting(
        self, direction: str, step: int, what: str, moved: Tensor, peers: Sequence[int], issued: Moment | None = None
    ) -> Iterator[None]:
        """Note how long the body takes: a wait for what was issued before, or else a whole communication."""
        if not self._on:
            yield
            return
        began = moment(self._device)
        yield
        ended = moment(self._device)
        size = (what, tuple(moved.shape), moved.dtype)
        wait = Wait(direction=direction, step=step, size=size, peers=tuple(peers))
        self._noted.append((wait, (began if issued is None else issued, began, ended)))

    def waits(self, ahead_seconds: float = 0.0) -> list[Wait]:
        """Return what was waited for, in order, by a clock that is so far behind; on CUDA after the device is done."""
        (told, self.uncertainty_seconds), found = seconds_of(self._device), []
        for wait, moments in self._noted:
            issued, began, ended = (told(then) - ahead_seconds for then in moments)
            found.append(replace(wait, issued=issued, began=began, ended=ended))
        return found
