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
    folder = tmp_path_factory.mktemp("two")
    with RanksOnStub(Stub(installation, folder, has_values=True)) as ranks:
        yield ranks
