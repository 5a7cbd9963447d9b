"""One server on a tiny model with a random drafter, shared by the tests that need nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config import RuntimeConfig
from tests.triton_repo.clients import ADMIN_KEY, eventually, free_address, idle
from triton_repo.package import package
from triton_repo.server import Address, TritonServer


@pytest.fixture(scope="session")
def server(tiny_pair_build: Path) -> Iterator[TritonServer]:
    build = tiny_pair_build
    package(build)
    config = RuntimeConfig(kv_cache_mb=64, prefix_cache_mb=8, num_threads=1)
    with TritonServer(build / "repository", build, free_address(), config, ADMIN_KEY) as running:
        yield running


@pytest.fixture
def address(server: TritonServer) -> Iterator[Address]:
    """Where the server listens; after the test it must be healthy and idle."""
    yield server.address
    assert server.is_ready()
    eventually(lambda: idle(server.address))
