"""The engine folder's manifest: what `engines` built, and what the runtime insists on.

`engines` writes it last, so a folder with a manifest is a complete folder. The runtime reads it
first and refuses anything that does not fit this machine with the command that rebuilds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runtime.spec import DrafterDims, KvDims, VerifierDims

FORMAT = 1
FILE_NAME = "manifest.json"
SINGLE_TOKEN = "_single_token"  # ends the name of an engine's second graph, for single tokens
TENSORRT = ("tensorrt", "tensorrt_rtx")  # builders whose engines are plans for a GPU


class ManifestError(Exception):
    """The engine folder is incomplete, damaged, or was built for something else."""


@dataclass(frozen=True)
class Artifact:
    """One published file of the engine folder; `sha256` covers it and its `data_files`."""

    path: str
    bytes: int
    sha256: str
    data_files: tuple[str, ...] = ()  # external weights beside an ONNX file

    @classmethod
    def of(cls, path: Path, *data_files: Path) -> Artifact:
        """What `path` and the data files beside it hold."""
        files = (path, *data_files)
        digests = [hash_file(file) for file in files]
        digest = digests[0]
        if data_files:
            digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        size = sum(file.stat().st_size for file in files)
        return cls(path.name, size, digest, tuple(file.name for file in data_files))


@dataclass(frozen=True)
class Builder:
    """What made the engines: `onnxruntime`, `tensorrt` or `tensorrt_rtx`, and its version."""

    name: str
    version: str


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json."""

    name: str
    dtype: str
    opset: int
    builder: Builder
    verifier: VerifierDims
    drafter: DrafterDims | None
    artifacts: dict[str, Artifact]  # "verifier", "drafter", "draft_vocab" (d2t as target ids), ...
    tokenizer_sha256: str
    eos_token_ids: tuple[int, ...]
    device: dict[str, Any] = field(default_factory=dict)
    # The most that the engines serve, under RuntimeConfig's names; empty for no limit.
    serving_limits: dict[str, int] = field(default_factory=dict)
    parity: dict[str, Any] = field(default_factory=dict)
    cost: str | None = None  # where the cost table goes in the engine folder, measured or not yet
    calibration: str | None = None  # likewise
    format: int = FORMAT

    @property
    def on_cpu(self) -> bool:
        """Whether the engines run on a CPU."""
        provider = self.device.get("provider", "CPUExecutionProvider")
        return self.builder.name not in TENSORRT and provider == "CPUExecutionProvider"

    @property
    def fingerprint(self) -> str:
        """Identity of what computes K/V: a hash over the artifacts. Keys the prefix cache."""
        parts = [f"{name}:{a.sha256}" for name, a in sorted(self.artifacts.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def to_json(self) -> str:
        """The manifest as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def load_manifest(engine_dir: Path) -> Manifest:
    """Read and check `engine_dir`/manifest.json; artifacts must exist with their recorded size.

    Raises ManifestError with the command that rebuilds.
    """
    path = engine_dir / FILE_NAME
    rebuild = "run `make engines` to build it again"
    if not path.is_file():
        raise ManifestError(f"{engine_dir} holds no {FILE_NAME}: run `make engines` first")
    try:
        data = json.loads(path.read_text())
        if data.get("format") != FORMAT:
            raise ManifestError(
                f"{path} has format {data.get('format')}, this version reads {FORMAT}: {rebuild}"
            )
        verifier, drafter = data["verifier"], data["drafter"]
        verifier = VerifierDims(
            **{
                **verifier,
                "kv": KvDims(**verifier["kv"]),
                "tapped_layers": tuple(verifier["tapped_layers"]),
            }
        )
        if drafter is not None:
            drafter = DrafterDims(**{**drafter, "kv": KvDims(**drafter["kv"])})
        manifest = Manifest(
            **{
                **data,
                "builder": Builder(**data["builder"]),
                "verifier": verifier,
                "drafter": drafter,
                "artifacts": {
                    name: Artifact(**{**a, "data_files": tuple(a["data_files"])})
                    for name, a in data["artifacts"].items()
                },
                "eos_token_ids": tuple(data["eos_token_ids"]),
            }
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{path} cannot be read ({error!r}): {rebuild}") from error
    for name, artifact in manifest.artifacts.items():
        file = engine_dir / artifact.path
        files = [file, *(engine_dir / extra for extra in artifact.data_files)]
        if not all(f.is_file() for f in files):
            raise ManifestError(f"{engine_dir} lacks its {name} ({artifact.path}): {rebuild}")
        size = sum(f.stat().st_size for f in files)
        if size != artifact.bytes:
            raise ManifestError(
                f"{file} has {size} bytes, the manifest says {artifact.bytes}: {rebuild}"
            )
    return manifest


def hash_file(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_hash(hf_dir: Path) -> str:
    """SHA-256 over the tokenizer's file, its configuration and its chat template."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    parts = [hash_file(hf_dir / n) if (hf_dir / n).is_file() else "-" for n in names]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
