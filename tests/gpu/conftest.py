"""Worlds on one GPU."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore

from parbench.bench.world.world import World, open_world
from tests.support.ranks import Ranks

NCCL_TIMEOUT_SECONDS = 30.0


@pytest.fixture
def nccl_world() -> Iterator[World]:
    """An NCCL world with this process as its only rank."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with (
        mock.patch.dict(os.environ, variables),
        open_world("nccl", "cuda", 0, NCCL_TIMEOUT_SECONDS, HashStore()) as world,
    ):
        yield world


@pytest.fixture(scope="module")
def ranks_on_one_gpu() -> Iterator[Ranks]:
    """Two gloo ranks that share a GPU; CUDA tensors are staged through the host."""
    with Ranks(2, "cuda") as ranks:
        yield ranks
