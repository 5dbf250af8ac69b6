"""What a rank does by itself: a matrix product and a copy in memory, to hold communication against."""

import torch

from bench.launch.control_channel import Work
from bench.operations.operation import Operation
from bench.operations.test_pattern import DataPattern, poison
from bench.plan.operation_spec import DTYPES
from bench.world.subject import Description, Subject
from bench.world.world import World


class Gemm(Subject):
    """C = A B of square float32 matrices: 2 m^3 floating-point operations a step."""

    def __init__(self, m: int, device: torch.device) -> None:
        # small whole numbers, whose products and sums are exact in float32 in any order
        rows = torch.arange(m, device=device)
        self._a = ((rows[:, None] * 7 + rows[None, :] * 3) % 5).float()
        self._b = ((rows[:, None] * 2 + rows[None, :] * 11) % 7).float()
        self._c = torch.empty(m, m, device=device)
        self._m = m

    def step(self) -> None:
        torch.mm(self._a, self._b, out=self._c)

    def reset(self) -> None:
        self._c.fill_(float("nan"))

    def check(self) -> int:
        """Compare one row and one column with whole-number arithmetic on the CPU."""
        a, b, c = self._a.cpu().long(), self._b.cpu().long(), self._c.cpu()
        row = (a[0][:, None] * b).sum(dim=0)
        column = (a * b[:, -1][None, :]).sum(dim=1)
        return int((c[0] != row).sum() + (c[:, -1] != column).sum())

    def describe(self) -> Description:
        flops = 2 * self._m**3
        return Description(work=(Work(name="flops", amount=flops),), details={"m": self._m, "dtype": "float32"})


def gemm(world: World, *, m: int) -> Gemm:
    return Gemm(m, world.device)


def copy(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Copy a buffer of ``size_bytes`` into another on every rank, each for itself; algbw counts each byte once."""
    code = DataPattern(dtype, world.size, world.device)
    count = size_bytes // DTYPES[dtype].itemsize
    source = code.values(world.rank, 0, count)
    target = source.clone()
    return Operation(
        call=lambda: target.copy_(source),
        restore=lambda: poison(target),
        output=target,
        expected=lambda: code.values(world.rank, 0, count),
        description=Description(
            work=(Work(name="algbw", amount=size_bytes),),
            details={"size_bytes": size_bytes, "read_bytes": size_bytes, "written_bytes": size_bytes},
        ),
    )
