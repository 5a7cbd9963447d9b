"""The engines as models of their own, for profiling them raw with perf_analyzer.

    build/<name>/standalone/{verifier,drafter}/config.pbtxt
    build/<name>/standalone/{verifier,drafter}/1/<engine files>
    build/<name>/standalone/{verifier,drafter}/inputs/<tensor>   raw bytes of one step
    build/<name>/standalone/{verifier,drafter}/perf_analyzer.args

Nothing serves from these: they need a Triton with the TensorRT or ONNX Runtime backend, as NVIDIA's
container has them. Random inputs would point outside the pools, so each model brings one decoding
step: `perf_analyzer $(cat .../perf_analyzer.args)`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.publish import content_key, link_or_copy, publish
from runtime.batch import DraftSegment, VerifySegment, pack_draft, pack_verify
from runtime.manifest import TENSORRT, Manifest, hash_file, load_manifest
from runtime.randomness import DraftNoise
from runtime.spec import (
    KvDims,
    TensorSpec,
    drafter_inputs,
    drafter_outputs,
    verifier_inputs,
    verifier_outputs,
)

CONTEXT_TOKENS = 256
TYPES = {"int64": "INT64", "fp32": "FP32", "fp16": "FP16", "bf16": "BF16"}


def package_standalone(build_dir: Path) -> bool:
    """Make `build_dir`/standalone from `build_dir`/engines.

    Returns whether there was anything to do. Raises ManifestError when there are no complete
    engines, PublishError when the disk is full.
    """
    engine_dir = build_dir / "engines"
    manifest = load_manifest(engine_dir)
    models = {"verifier": (verifier_inputs(manifest.verifier), verifier_outputs(manifest.verifier))}
    if manifest.drafter is not None:
        models["drafter"] = (drafter_inputs(manifest.drafter), drafter_outputs(manifest.drafter))
    steps = example_steps(manifest)

    def make(repository: Path) -> None:
        for name, (inputs, outputs) in models.items():
            folder, artifact = repository / name, manifest.artifacts[name]
            for part in ("1", "inputs"):
                (folder / part).mkdir(parents=True)
            for file in (artifact.path, *artifact.data_files):
                link_or_copy(engine_dir / file, folder / "1" / file)
            for tensor, array in steps[name].items():
                (folder / "inputs" / tensor).write_bytes(array.tobytes())
            (folder / "config.pbtxt").write_text(render_engine(name, manifest, inputs, outputs))
            place = build_dir / "standalone" / name / "inputs"
            arguments = ["-m", name, "--input-data", str(place)]
            for tensor, array in steps[name].items():
                arguments += ["--shape", f"{tensor}:{','.join(map(str, array.shape))}"]
            (folder / "perf_analyzer.args").write_text(" ".join(arguments) + "\n")

    key = content_key(manifest.to_json(), hash_file(Path(__file__)), str(build_dir))
    return publish(build_dir / "standalone", key, make)


def render_engine(
    name: str, manifest: Manifest, inputs: list[TensorSpec], outputs: list[TensorSpec]
) -> str:
    """config.pbtxt of one engine: every tensor with its dtype, -1 for each symbol."""

    def entry(spec: TensorSpec) -> str:
        dims = ", ".join(str(d) if isinstance(d, int) else "-1" for d in spec.dims)
        return f'  {{ name: "{spec.name}" data_type: TYPE_{TYPES[spec.dtype]} dims: [ {dims} ] }}'

    plan = manifest.builder.name in TENSORRT
    platform = "tensorrt_plan" if plan else "onnxruntime_onnx"
    # A plan has two profiles, decode first; Triton takes the one that fits.
    instances = 'kind: KIND_GPU profile: [ "0", "1" ]' if plan else "kind: KIND_AUTO"
    return "\n".join(
        [
            f'name: "{name}"',
            f'platform: "{platform}"',
            f'default_model_filename: "{manifest.artifacts[name].path}"',
            "max_batch_size: 0",
            "input [",
            ",\n".join(map(entry, inputs)),
            "]",
            "output [",
            ",\n".join(map(entry, outputs)),
            "]",
            f"instance_group [ {{ {instances} count: 1 }} ]",
            "",
        ]
    )


def example_steps(manifest: Manifest) -> dict[str, dict[str, NDArray]]:
    """Inputs of one decoding round of one request, by graph: a full block after some context."""
    verifier, draft = manifest.verifier, manifest.drafter
    block = 0 if draft is None else draft.block_size
    context = min(CONTEXT_TOKENS, verifier.max_positions - block - 1)
    blocks = list(range(-(-context // verifier.kv.block_tokens)))
    tokens = [0] * (block + 1)
    batch = pack_verify(
        [VerifySegment(tokens, context, blocks, len(tokens))], verifier.kv.block_tokens
    )
    steps: dict[str, dict[str, NDArray]] = {
        "verifier": {**batch.inputs, **_pools(verifier.kv, len(blocks))}
    }
    if draft is not None:
        segment = DraftSegment(
            features=np.zeros((1, draft.feature_size), np.float32),
            context_len=context - 1,
            blocks=blocks,
            anchor_id=0,
            noise=DraftNoise(np.full(block, 0.5, np.float32), np.zeros((block, 1), np.float32)),
        )
        inputs = pack_draft([segment], draft.kv.block_tokens).inputs
        steps["drafter"] = {**inputs, **_pools(draft.kv, len(blocks))}
    return steps


def _pools(kv: KvDims, num_blocks: int) -> dict[str, NDArray]:
    # Zeros have the same bytes in fp16 and bf16, which numpy lacks.
    dtype = np.float32 if kv.dtype == "fp32" else np.float16
    shape = (num_blocks, kv.block_tokens, kv.num_kv_heads, kv.head_dim)
    return {spec.name: np.zeros(shape, dtype) for spec in kv.pool_specs()}
