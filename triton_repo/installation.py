"""The tritonserver that the nvidia-pytriton package carries, made ready for this Python.

Only that package's files are used, none of its Python code: the server, its Python backend, and a
stub program per Python version, which runs model.py. The stub finds libpython and the backend
library its stub by the folders they lie in, so both get a folder of their own here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PACKAGE = "nvidia-pytriton"
_STUB_NAME = "triton_python_backend_stub"

# The stubs were compiled against numpy 1 and read a dtype's item size at byte 32 of its structure,
# where numpy 2 keeps flags: every array would come out with wrong strides and sizes. numpy 2 has
# the item size at byte 40. Python 3.13 has no numpy 1, so the copied stub is taught the new place:
# (code as compiled, code with the other offset, how often it occurs).
_NUMPY_2_PATCHES = (
    # movslq 0x20(%rax),%rax; imul %rdx,%rax -- bytes of an array that becomes a tensor
    (bytes.fromhex("48634020480fafc2"), bytes.fromhex("48634028480fafc2"), 4),
    # mov (%rsi),%rax; mov 0x20(%rax),%eax; mov %eax,-0x80(%rbp) -- strides of one made from it
    (bytes.fromhex("488b068b4020894580"), bytes.fromhex("488b068b4028894580"), 1),
)


class InstallationError(Exception):
    """The bundled server cannot run here; the message says what to install."""


@dataclass(frozen=True)
class Installation:
    """What starts the server: its program, its backends, and the environment of both."""

    tritonserver: Path
    backends: Path
    environment: dict[str, str]


def prepare_installation(folder: Path) -> Installation:
    """Fill `folder` with a Python backend for this Python and return how to start the server.

    Raises InstallationError naming what is missing and the command that installs it.
    """
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise InstallationError(
            f"{_PACKAGE}, which carries tritonserver, is not installed in {sys.prefix}: "
            "run `make install`"
        ) from error
    bundle = Path(str(package.locate_file("pytriton/tritonserver")))
    bundled_libraries = Path(str(package.locate_file("nvidia_pytriton.libs")))
    shutil.rmtree(folder, ignore_errors=True)
    backend, libraries = folder / "backends" / "python", folder / "lib"
    backend.mkdir(parents=True)
    libraries.mkdir()
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (backend / name).symlink_to(bundle / "backends" / "python" / name)
    code = _stub_code(bundle / "python_backend_stubs")
    # Copied, not linked: the path to libraries inside leads nowhere from here, so LD_LIBRARY_PATH
    # decides, and with it this Python's own libpython under the name that the stub looks for.
    stub = backend / _STUB_NAME
    stub.write_bytes(code)
    stub.chmod(0o755)
    libpython = _find_libpython()
    for name in set(re.findall(rb"libpython3[-.\w]*\.so[.\d]*", code)):
        (libraries / name.decode()).symlink_to(libpython)
    search_path = [str(libraries.resolve()), str(bundled_libraries)]
    if os.environ.get("LD_LIBRARY_PATH"):
        search_path.append(os.environ["LD_LIBRARY_PATH"])
    installation = Installation(
        bundle / "bin" / "tritonserver",
        backend.parent,
        {
            "LD_LIBRARY_PATH": os.pathsep.join(search_path),
            "DSPARK_SITE_PACKAGES": sysconfig.get_path("purelib"),
        },
    )
    for program in (installation.tritonserver, stub):
        _check_libraries(program, installation.environment)
    return installation


def _stub_code(stubs: Path) -> bytes:
    """The stub program for this Python and the installed numpy."""
    version = "{}.{}".format(*sys.version_info[:2])
    path = stubs / version / _STUB_NAME
    if not path.is_file():
        known = ", ".join(sorted(p.name for p in stubs.iterdir()))
        raise InstallationError(f"tritonserver has no stub for Python {version}, only for {known}")
    code = path.read_bytes()
    numpy_version = metadata.version("numpy")
    return code if numpy_version.startswith("1.") else _for_numpy_2(code, numpy_version)


def _for_numpy_2(code: bytes, numpy_version: str) -> bytes:
    for old, new, count in _NUMPY_2_PATCHES:
        if code.count(old) != count:
            raise InstallationError(
                f"numpy {numpy_version} does not work with tritonserver's stub for Python "
                "{}.{}: run `pip install 'numpy<2'`".format(*sys.version_info[:2])
            )
        code = code.replace(old, new)
    return code


def _find_libpython() -> Path:
    name = str(sysconfig.get_config_var("INSTSONAME"))
    folder = Path(str(sysconfig.get_config_var("LIBDIR")))
    for path in (folder / name, folder / str(sysconfig.get_config_var("MULTIARCH")) / name):
        if path.is_file() and ".so" in name:
            return path
    package = "libpython{}.{}".format(*sys.version_info[:2])
    raise InstallationError(
        f"Triton's Python stub needs {package}.so.1.0, which {sys.base_prefix} lacks: "
        f"install it (Debian, Ubuntu: apt-get install {package}), or make .venv with another "
        "Python (make PYTHON=...)"
    )


def _check_libraries(program: Path, environment: dict[str, str]) -> None:
    """Run `program` to see whether the loader finds its libraries."""
    run = subprocess.run(
        [program, "--help"], env=os.environ | environment, capture_output=True, text=True
    )
    missing = re.search(r"while loading shared libraries: (\S+?): (.+)", run.stderr)
    if missing:
        raise InstallationError(
            f"{program.name} needs the system library {missing[1]} ({missing[2]}): install the "
            "package that holds it"
        )
