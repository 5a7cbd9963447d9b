"""ONNX graphs to an engine folder, `build/<name>/engines`, for one builder.

For ONNX Runtime the engine is the ONNX file itself, linked and not copied, after a session has
loaded it on this machine; for CPUs graphs are rewritten where that helps (`engines.single_token`,
`engines.int8_drafter`). For TensorRT it is a plan. The manifest is the export's, completed with
what built the engines, and for TensorRT with what they can serve.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines.int8_drafter import build_int8_drafter
from engines.profiles import profiles, serving_limits
from engines.single_token import build_single_token
from engines.tensorrt_builder import (
    BuildError,
    PlanOptions,
    build_plan,
    builder_of,
    find_tensorrt,
)
from export.progress import say, step
from export.publish import content_key, link_or_copy, publish
from runtime import calibration, cost
from runtime.config import RuntimeConfig
from runtime.manifest import (
    FILE_NAME,
    SINGLE_TOKEN,
    Artifact,
    Builder,
    Manifest,
    load_manifest,
)
from runtime.spec import drafter_inputs, verifier_inputs

ONNXRUNTIME, TENSORRT = TARGETS = ("onnxruntime", "tensorrt")
GRAPHS = ("verifier", "drafter")
NVIDIA_DEVICE = Path("/dev/nvidiactl")


def build_engines(
    folder: Path,
    target: str = ONNXRUNTIME,
    config: RuntimeConfig | None = None,
    options: PlanOptions | None = None,
    int8_drafts: bool = True,
) -> bool:
    """Build `folder`/engines from `folder`/onnx with ONNX Runtime or TensorRT.

    `config` (what the engines shall serve) and `options` are TensorRT's; `int8_drafts` allows
    ONNX Runtime's drafter for CPUs to be in int8 (`engines.int8_drafter`). Returns False when the
    engines were up to date: same export, same builder, same device, same options.
    Raises BuildError when a graph cannot be loaded or built on this machine, ManifestError when
    there is no complete export, PublishError when the disk is full.
    """
    exported = replace(load_manifest(folder / "onnx"), cost=cost.PATH, calibration=calibration.PATH)
    if target == ONNXRUNTIME:
        return _build_onnxruntime(folder, exported, int8_drafts)
    return _build_tensorrt(folder, exported, config or RuntimeConfig(), options or PlanOptions())


def _build_onnxruntime(folder: Path, exported: Manifest, int8_drafts: bool) -> bool:
    # Asking ONNX Runtime would load the CUDA libraries, and complain where there are none.
    provider = "CUDAExecutionProvider" if NVIDIA_DEVICE.exists() else "CPUExecutionProvider"
    manifest = replace(
        exported,
        builder=Builder(ONNXRUNTIME, version("onnxruntime-gpu")),
        device={"machine": platform.machine(), "provider": provider},
    )

    def make(partial: Path) -> None:
        artifacts = dict(manifest.artifacts)
        for artifact in artifacts.values():
            _link(artifact, folder / "onnx", partial)
        for graph in GRAPHS:
            if graph in manifest.artifacts:
                with step(f"loading the {graph} in ONNX Runtime"):
                    _load(partial / manifest.artifacts[graph].path, manifest.dtype, provider)
        if manifest.on_cpu and manifest.dtype == "fp32":
            files = build_single_token(partial / artifacts["verifier"].path, manifest.verifier)
            if files:
                artifacts["verifier" + SINGLE_TOKEN] = Artifact.of(*files)
            if manifest.drafter is not None and int8_drafts:
                fp32 = artifacts["drafter"]
                if files := build_int8_drafter(partial / fp32.path, manifest.drafter):
                    artifacts["drafter"] = Artifact.of(*files)
                    for name in (fp32.path, *fp32.data_files):
                        (partial / name).unlink()
        (partial / FILE_NAME).write_text(replace(manifest, artifacts=artifacts).to_json())

    key = content_key(manifest.to_json(), SINGLE_TOKEN, int8_drafts)  # older folders lack these
    return publish(folder / "engines", key, make)


def _build_tensorrt(
    folder: Path, exported: Manifest, config: RuntimeConfig, options: PlanOptions
) -> bool:
    trt = find_tensorrt()
    builder = builder_of(trt)
    limits = serving_limits(exported, config)
    manifest = replace(
        exported, builder=builder, device=_device(builder, options), serving_limits=limits
    )
    by_graph = profiles(manifest, limits)
    inputs = {"verifier": verifier_inputs(manifest.verifier)}
    if manifest.drafter is not None:
        inputs["drafter"] = drafter_inputs(manifest.drafter)

    def make(partial: Path) -> None:
        say(f"building with {builder.name} {builder.version} for {_target_text(manifest.device)}")
        artifacts = {}
        for name, artifact in exported.artifacts.items():
            if name not in inputs:
                _link(artifact, folder / "onnx", partial)
                artifacts[name] = artifact
                continue
            plan = partial / f"{name}.plan"
            with step(f"building the {name}"):
                build_plan(
                    trt,
                    folder / "onnx" / artifact.path,
                    plan,
                    inputs[name],
                    list(by_graph[name].values()),
                    options,
                    # Without effect in RTX.
                    folder / "timing.cache" if builder.name == TENSORRT else None,
                )
            artifacts[name] = Artifact.of(plan)
        built = replace(manifest, artifacts=artifacts)
        (partial / FILE_NAME).write_text(built.to_json())

    return publish(folder / "engines", content_key(manifest.to_json(), asdict(options)), make)


def _device(builder: Builder, options: PlanOptions) -> dict[str, Any]:
    """For what the plans are: compute capabilities as SM86 (none: all that RTX supports)."""
    device: dict[str, Any] = {
        "machine": platform.machine(),
        "compute_capabilities": list(options.compute_capabilities),
        "hardware_compatibility": options.hardware_compatibility,
    }
    if options.compute_capabilities:
        return device
    if NVIDIA_DEVICE.exists():
        import torch

        major, minor = torch.cuda.get_device_capability()
        device["compute_capabilities"] = [f"SM{major}{minor}"]
        device["name"] = torch.cuda.get_device_name()
    elif builder.name == TENSORRT:
        raise BuildError(
            f"tensorrt {builder.version} builds on the NVIDIA GPU that it builds for, and there "
            "is none here: build there, or run `make install` for TensorRT-RTX"
        )
    return device


def _target_text(device: dict[str, Any]) -> str:
    return ", ".join(device["compute_capabilities"]) or "every GPU it supports"


def _link(artifact: Artifact, source: Path, target: Path) -> None:
    for name in (artifact.path, *artifact.data_files):
        link_or_copy(source / name, target / name)


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
