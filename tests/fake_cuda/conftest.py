"""Stub GPUs for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_cuda.build import Installation, install
from tests.fake_cuda.stub import RanksOnStub, Stub


@pytest.fixture(scope="session")
def installation() -> Installation:
    return install()


@pytest.fixture
def stub(installation: Installation, tmp_path: Path) -> Stub:
    """Two stub GPUs."""
    return Stub(installation, tmp_path)


@pytest.fixture(scope="module")
def two_ranks_on_stub(
    installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RanksOnStub]:
    """Two NCCL ranks on stub GPUs that run functions of tests."""
    with RanksOnStub(Stub(installation, tmp_path_factory.mktemp("two"))) as ranks:
        yield ranks
