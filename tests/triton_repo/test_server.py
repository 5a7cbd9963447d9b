"""What the launcher says when the server cannot run here; the running server is in test_e2e."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton_repo.clients import eventually, free_address, living_processes
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


@pytest.mark.slow
def test_the_server_ends_when_its_launcher_is_killed(repository: Path, tmp_path: Path) -> None:
    """Whoever killed it with SIGKILL would find the ports taken and the memory full."""
    (repository / "dspark" / "1" / "model.py").write_text(
        "import os, sys\n"
        "sys.path.insert(0, os.environ['DSPARK_SITE_PACKAGES'])\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests): pass\n"
    )
    code = (
        "import sys, time; from pathlib import Path\n"
        "from triton_repo.server import Address, TritonServer\n"
        "address = Address('127.0.0.1', *map(int, sys.argv[3:]))\n"
        "server = TritonServer(Path(sys.argv[1]), Path(sys.argv[2]), address)\n"
        "server.__enter__(); print(server.pid, flush=True); time.sleep(600)\n"
    )
    ports = [str(port) for port in free_address().ports.values()]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(repository), str(tmp_path), *ports],
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        group = int(launcher.stdout.readline())
        assert living_processes(group)
        launcher.kill()
    eventually(lambda: not living_processes(group), within_s=30)
