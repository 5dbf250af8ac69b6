"""Worlds on one GPU."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore

from parbench.bench.world.world import World, open_world
from tests.support.ranks import Ranks

NCCL_TIMEOUT_SECONDS = 30.0


@pytest.fixture(scope="session")
def nccl_world() -> Iterator[World]:
    """An NCCL world with this process as its only rank.

    There is one for all tests: torch 2.11 crashes when it splits a group of a second world.
    """
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with ExitStack() as stack:
        with mock.patch.dict(os.environ, variables):
            world = open_world("nccl", "cuda", 0, NCCL_TIMEOUT_SECONDS, HashStore())
            opened = stack.enter_context(world)
        yield opened


@pytest.fixture(scope="module")
def ranks_on_one_gpu() -> Iterator[Ranks]:
    """Two gloo ranks that share a GPU; CUDA tensors are staged through the host."""
    with Ranks(2, "cuda") as ranks:
        yield ranks
