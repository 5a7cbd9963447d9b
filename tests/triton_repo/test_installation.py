"""What is missing on a machine is named; numpy 2 gets the stub it needs."""

from __future__ import annotations

import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from triton_repo import installation
from triton_repo.installation import InstallationError, prepare_installation


def bundled_stub(version: str) -> bytes:
    package = metadata.distribution("nvidia-pytriton")
    stubs = Path(str(package.locate_file("pytriton/tritonserver/python_backend_stubs")))
    return (stubs / version / "triton_python_backend_stub").read_bytes()


def test_backend_folder_is_complete_and_can_be_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        made = prepare_installation(tmp_path / "triton")
        names = {path.name for path in (made.backends / "python").iterdir() if path.is_file()}
        assert names == {
            "libtriton_python.so",
            "triton_python_backend_stub",
            "triton_python_backend_utils.py",
        }
        assert made.tritonserver.is_file()


def test_unsupported_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 99))
    with pytest.raises(InstallationError, match=r"no stub for Python 3\.99, only for .*3\.11"):
        prepare_installation(tmp_path / "triton")


def test_missing_libpython_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: "/nowhere" if name == "LIBDIR" else real(name)
    )
    with pytest.raises(InstallationError, match=r"apt-get install libpython3\.\d+"):
        prepare_installation(tmp_path / "triton")


def test_missing_library_is_named(tmp_path: Path) -> None:
    program = tmp_path / "tritonserver"
    program.write_text(
        "#!/bin/sh\necho 'tritonserver: error while loading shared libraries: libz.so.1: "
        "cannot open shared object file: No such file or directory' >&2\nexit 127\n"
    )
    program.chmod(0o755)
    with pytest.raises(InstallationError, match=r"needs the system library libz\.so\.1 \(cannot"):
        installation._check_libraries(program, {})


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_stub_for_numpy_2_differs_in_five_bytes(version: str) -> None:
    code = bundled_stub(version)
    patched = installation._for_numpy_2(code, "2.2.6")
    changes = [(old, new) for old, new in zip(code, patched, strict=True) if old != new]
    assert changes == [(0x20, 0x28)] * 5


def test_stub_that_cannot_be_changed_is_refused() -> None:
    with pytest.raises(InstallationError, match=r"numpy 2\.2\.6 does not work.*numpy<2"):
        installation._for_numpy_2(b"another compiler's code", "2.2.6")
