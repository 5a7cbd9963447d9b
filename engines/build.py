"""ONNX graphs to an engine folder, `build/<name>/engines`, for one builder.

For ONNX Runtime the engine is the ONNX file itself, linked and not copied, after a session has
loaded it on this machine. The manifest is the export's, completed with what built the engines.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from export.progress import step
from export.publish import content_key, link_or_copy, publish
from runtime import calibration, cost
from runtime.manifest import FILE_NAME, Builder, load_manifest

ONNXRUNTIME = "onnxruntime"
GRAPHS = ("verifier", "drafter")
NVIDIA_DEVICE = Path("/dev/nvidiactl")


class BuildError(Exception):
    """The engines cannot be built here; the message says why in one sentence."""


def build_engines(folder: Path) -> bool:
    """Build `folder`/engines from `folder`/onnx with ONNX Runtime.

    Returns False when they were up to date: same export, same ONNX Runtime, same provider.
    Raises BuildError when ONNX Runtime cannot load a graph on this machine, ManifestError when
    there is no complete export, PublishError when the disk is full.
    """
    source, target = folder / "onnx", folder / "engines"
    # Asking ONNX Runtime would load the CUDA libraries, and complain where there are none.
    provider = "CUDAExecutionProvider" if NVIDIA_DEVICE.exists() else "CPUExecutionProvider"
    manifest = replace(
        load_manifest(source),
        builder=Builder(ONNXRUNTIME, version("onnxruntime-gpu")),
        device={"machine": platform.machine(), "provider": provider},
        cost=cost.PATH,
        calibration=calibration.PATH,
    )

    def make(partial: Path) -> None:
        for artifact in manifest.artifacts.values():
            for name in (artifact.path, *artifact.data_files):
                link_or_copy(source / name, partial / name)
        for graph in GRAPHS:
            if graph in manifest.artifacts:
                with step(f"loading the {graph} in ONNX Runtime"):
                    _load(partial / manifest.artifacts[graph].path, manifest.dtype, provider)
        (partial / FILE_NAME).write_text(manifest.to_json())

    return publish(target, content_key(manifest.to_json()), make)


def _load(path: Path, dtype: str, provider: str) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    providers = list(dict.fromkeys([provider, "CPUExecutionProvider"]))
    try:
        ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise BuildError(
            f"ONNX Runtime cannot run the {dtype} {path.stem} on this machine's {provider}: "
            f"{str(error).splitlines()[0]}"
            + ("" if dtype == "fp32" else "; `dspark export --dtype fp32` makes one that it can")
        ) from error
