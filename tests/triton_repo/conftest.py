"""One server on a tiny model with a random drafter, shared by the tests that need nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config import RuntimeConfig
from tests.triton_repo.clients import ADMIN_KEY, eventually, free_address, idle
from triton_repo.package import package
from triton_repo.server import Address, TritonServer

# The decoder of the shared server reads a wall clock that is a day off, forwards and backwards in
# turn. Whatever a test finds there holds under it.
JUMPING_CLOCK = """\
import itertools, time
days, time_s, time_ns = itertools.cycle((1, -1)), time.time, time.time_ns
time.time = lambda: time_s() + next(days) * 86_400
time.time_ns = lambda: time_ns() + next(days) * 86_400 * 10**9
print(f"the wall clock jumped by {time.time() - time.time():.0f} s", flush=True)
"""


@pytest.fixture(scope="session")
def server(
    tiny_pair_build: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    package(tiny_pair_build)
    folder = tmp_path_factory.mktemp("server")
    repository = shutil.copytree(tiny_pair_build / "repository", folder / "repository")
    # The first of our modules that model.py imports
    (repository / "dspark" / "1" / "runtime" / "__init__.py").write_text(JUMPING_CLOCK)
    config = RuntimeConfig(kv_cache_mb=64, prefix_cache_mb=8, num_threads=1)
    with TritonServer(repository, folder, free_address(), config, ADMIN_KEY) as running:
        yield running


@pytest.fixture
def address(server: TritonServer) -> Iterator[Address]:
    """Where the server listens; after the test it must be healthy and idle."""
    yield server.address
    assert server.is_ready()
    eventually(lambda: idle(server.address))
