"""ONNX graphs to an engine folder, `build/<name>/engines`, for one builder.

For ONNX Runtime the engine is the ONNX file itself, linked, not copied. The manifest comes from
the export's, completed with what built the engines and for which machine.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from export.publish import content_key, link_or_copy, publish
from runtime.manifest import FILE_NAME, Builder, Manifest, load_manifest

BUILDERS = ("onnxruntime",)


class BuildError(Exception):
    """The engines cannot be built here; the message says why in one sentence."""


def build_engines(folder: Path, builder: str = "onnxruntime") -> bool:
    """Build `folder`/engines from `folder`/onnx; returns False when that was up to date.

    Raises BuildError when the machine cannot run the export's dtype, ManifestError when there is
    no complete export, PublishError when the disk is full.
    """
    source, target = folder / "onnx", folder / "engines"
    exported = load_manifest(source)
    manifest = _for_onnxruntime(exported)

    def make(partial: Path) -> None:
        for artifact in manifest.artifacts.values():
            for name in (artifact.path, *artifact.data_files):
                link_or_copy(source / name, partial / name)
        (partial / FILE_NAME).write_text(manifest.to_json())

    return publish(target, content_key(manifest.to_json()), make)


def _for_onnxruntime(exported: Manifest) -> Manifest:
    device: dict[str, Any] = {"machine": platform.machine()}
    return replace(
        exported, builder=Builder("onnxruntime", version("onnxruntime-gpu")), device=device
    )
