"""What a TensorRT module offers, name by name, read from the module itself.

The bindings of any version can be imported without TensorRT's own libraries, which pip cannot get:
functions of theirs are called only when something is built or run, so libraries of empty functions
will do. A version is recorded with a Python that its wheel is for, and gcc:

    pip download --no-deps --dest WHEELS tensorrt-cu12-bindings==11.4.0.106
    python -m tests.engines.record_tensorrt_api WHEELS/*.whl
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tensorrt_api"
CLASSES = (
    *("Builder", "BuilderFlag", "DataType", "ExecutionContextAllocationStrategy"),
    *("HardwareCompatibilityLevel", "IBuilderConfig", "ICudaEngine", "IExecutionContext"),
    *("IHostMemory", "ILogger", "INetworkDefinition", "IOptimizationProfile"),
    *("IProgressMonitor", "ITensor", "ITimingCache", "MemoryPoolType"),
    *("NetworkDefinitionCreationFlag", "OnnxParser", "ParserError", "Runtime", "TensorIOMode"),
)
OPERATORS = ("__init__", "__bool__")


def surface(module: Any) -> list[str]:
    """Members of `CLASSES`: `Class.member`, with parameters where it is called.

    A parameter with a default ends in `=`, a method returning one of `CLASSES` in `-> Class`, a
    property that can be set in ` =`; an overloaded method has one entry for each.
    """
    lines = set()
    for name in CLASSES:
        cls = getattr(module, name)
        for member in dir(cls):
            if member.startswith("_") and member not in OPERATORS:
                continue
            value = getattr(cls, member)
            signatures = _signatures(member, value.__doc__ or "") if callable(value) else []
            settable = " =" if getattr(value, "fset", None) else ""
            lines |= {f"{name}.{member}{signature}" for signature in signatures or [settable]}
    return sorted(lines)


def _signatures(name: str, doc: str) -> list[str]:
    """Signatures that pybind11 puts into the docstring of a method."""
    result = []
    for line in doc.splitlines():
        found = re.fullmatch(rf"(?:\d+\. )?{name}\(self: [\w.]+(?:, )?(.*)\)(?: -> (.*))?", line)
        if found:
            # No type of these classes contains a comma outside brackets.
            parts = re.split(r", (?![^\[(<]*[\])>])", found[1]) if found[1] else []
            names = [p.split(":")[0] + ("=" if " = " in p else "") for p in parts]
            returned = re.split(r"\W", found[2] or "")[-1].replace("IParser", "Parser")
            made = f" -> {returned}" if returned in CLASSES else ""
            result.append(f"({', '.join(names)}){made}")
    return result


def import_wheel(wheel: Path, folder: Path) -> None:
    """Unpack `wheel` into `folder` with empty libraries in `folder`/lib."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    bindings = str(folder / "tensorrt_bindings/tensorrt.so")

    def lines(*command: str) -> list[str]:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    missing = re.compile(r"(create|get|init)\w+")
    symbols = filter(missing.fullmatch, lines("nm", "-D", "--undefined-only", bindings))
    libraries = re.findall(r"\[(libnv\S+)\]", " ".join(lines("readelf", "-d", bindings)))
    source = folder / "lib" / "empty.c"
    source.parent.mkdir()
    source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols))
    for library in libraries:
        target = str(source.with_name(library))
        lines("gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", "-o", target, str(source))


def main(arguments: list[str]) -> None:
    """Record wheels, or as the child that has the libraries in its path, the module."""
    if not arguments:
        import tensorrt_bindings

        lines = surface(tensorrt_bindings)
        path = FOLDER / f"{tensorrt_bindings.__version__}.txt"
        path.write_text("\n".join(lines) + "\n")
        print(f"{path}: {len(lines)} names")
    for wheel in arguments:
        with tempfile.TemporaryDirectory() as folder:
            import_wheel(Path(wheel), Path(folder))
            paths = {"PYTHONPATH": f"{folder}:{os.getcwd()}", "LD_LIBRARY_PATH": f"{folder}/lib"}
            command = [sys.executable, "-m", "tests.engines.record_tensorrt_api"]
            subprocess.run(command, check=True, env={**os.environ, **paths})


if __name__ == "__main__":
    main(sys.argv[1:])
