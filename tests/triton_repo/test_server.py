"""What the launcher says when the server cannot run here; the running server is in test_e2e."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.triton_repo.clients import free_address
from triton_repo.server import Address, ServerError, TritonServer


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that looks packaged but whose model cannot be loaded."""
    model = tmp_path / "repository" / "dspark"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('name: "dspark" backend: "python" max_batch_size: 1')
    (model / "1" / "model.py").write_text(
        "import os, sys\n"
        "sys.path.insert(0, os.environ['DSPARK_SITE_PACKAGES'])\n"  # the stub needs numpy
        "class EngineError(Exception): pass\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        raise EngineError('the engines are for another machine: run `make engines`')\n"
        "    def execute(self, requests): pass\n"
    )
    return model.parent


def test_port_in_use_names_the_port_and_the_option(repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"grpc on 127.0.0.1:{port} \(Address already in use\).*--grpc-port"
        with pytest.raises(ServerError, match=message):
            TritonServer(repository, tmp_path, Address(http_port=0, grpc_port=port)).start()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (Address(http_port=70_000), "http on 127.0.0.1:70000 .*0-65535.*HTTP_PORT="),
        (Address(host="no-such-host.invalid"), "no-such-host.invalid:8000 .*--host"),
    ],
)
def test_impossible_address_is_named(
    repository: Path, tmp_path: Path, address: Address, message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        TritonServer(repository, tmp_path, address).start()


def test_missing_repository_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="make engines"):
        TritonServer(tmp_path / "repository", tmp_path).start()


@pytest.mark.slow
def test_model_that_cannot_load_is_quoted(repository: Path, tmp_path: Path) -> None:
    launcher = TritonServer(repository, tmp_path, free_address())
    with (
        pytest.raises(ServerError, match="the engines are for another machine: run `make engines`"),
        launcher,
    ):
        pass
    assert launcher.exit_code() is None  # stopped, and may be stopped again
    launcher.stop()
