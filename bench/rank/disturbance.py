"""A subject disturbed on purpose: what an injection does on its rank."""

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from bench.errors import UserError
from bench.plan.injection import Injection
from bench.world.subject import Description, Subject


class Disturbed:
    """A subject whose step takes longer, or whose result is wrong; ``sync`` waits for its device."""

    def __init__(self, subject: Subject, injection: Injection, sync: Callable[[], None]) -> None:
        self._subject, self._injection, self._sync = subject, injection, sync

    def step(self) -> None:
        """Take the subject's step, disturbed."""
        began = time.perf_counter()
        self._subject.step()
        if self._injection.kind == "slow":
            self._sync()  # a share of the step, not of its launch
            time.sleep(self._injection.amount * (time.perf_counter() - began))
        elif self._injection.kind == "corrupt":
            corrupt = getattr(self._subject, "corrupt", None)
            if corrupt is None:
                raise UserError(f"--inject {self._injection.text}: this subject has no corrupt()")
            corrupt()

    def issue(self) -> Sequence[dist.Work]:
        """Issue the subject's step; ``UserError`` if it is to be slow or wrong: apart, it can only come late."""
        if self._injection.kind != "late":
            raise UserError(f"--inject {self._injection.text}: mode async knows only late")
        works: Sequence[dist.Work] = getattr(self._subject, "issue")()  # noqa: B009 - not every subject has it
        return works

    def reset(self) -> None:
        """Reset the subject."""
        self._subject.reset()

    def check(self) -> int:
        """Check the subject."""
        return self._subject.check()

    def describe(self) -> Description:
        """Describe the subject."""
        return self._subject.describe()

    def close(self) -> None:
        """Close the subject."""
        self._subject.close()
