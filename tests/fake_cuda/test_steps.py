"""Training steps on stub GPUs: results, order of communication, communicators, and waiting."""

from collections import Counter
from dataclasses import dataclass

import pytest

from tests.fake_cuda.cases import Answer
from tests.fake_cuda.stub import RanksOnStub
from tests.fake_cuda.traces import (
    Call,
    Trace,
    collective_orders,
    left_communicators,
    timed_regions,
)
from tests.support.ranks import RankDiedError, RankError

pytestmark = pytest.mark.cuda_stub
SMALL = {"layers": 2, "microbatch": 2}
STEPS = {
    "ddp": ("ddp", {}),
    "ddp_bf16": ("ddp", {"precision": "bfloat16", "grad_compression": "bf16"}),
    "zero1": ("zero1", {}),
    "zero1_distributed": ("zero1", {"optimizer": "distributed"}),
    "fsdp": ("fsdp", {}),
    "fsdp_bf16": ("fsdp", {"precision": "bfloat16"}),
    "hsdp": ("hsdp", {}),
    "tp": ("tp", {}),
    "tp_sp": ("tp_sp", {}),
    "tp_fsdp": ("tp_fsdp", {}),
    "pp": ("pp", {"microbatches": 4}),
    "cp": ("cp", {}),
    "ep_dispatch": ("ep_dispatch", {}),
    "ep_layer": ("ep_layer", {}),
    "ep_step": ("ep_step", {}),
    "ep_step_fsdp": ("ep_step", {"fsdp": True}),
    "hybrid": ("hybrid", {}),
}
