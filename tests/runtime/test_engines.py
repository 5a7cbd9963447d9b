"""What every engine must do, whichever library runs it: on TensorRT itself where there is a GPU,
and on its stand-in everywhere."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.build import build_engines
from engines.calibrate import calibrate
from engines.cost_profile import profile
from engines.profiles import profiles
from export.checkpoint import load_drafter, load_target
from export.drafter import Drafter
from export.pair import DEFAULT_ATOL, ExportOptions, export_pair
from export.parity import Run, drafter_parity, module_runner, verifier_parity
from export.to_onnx import TORCH_DTYPES
from runtime.batch import DraftSegment, VerifySegment, pack_draft, pack_verify
from runtime.config import ConfigError, RuntimeConfig
from runtime.cost import load_cost
from runtime.decoder import Model
from runtime.engine import Engine, EngineError, load_engines
from runtime.kv_blocks import blocks_for
from runtime.manifest import load_manifest
from runtime.randomness import DraftNoise
from runtime.request import Request, validate_request
from runtime.spec import Dtype, KvDims, drafter_outputs
from tests.runtime import fake_tensorrt
from tests.runtime.fakes import Collector

pytestmark = pytest.mark.slow

TENSORRT = pytest.param("tensorrt", marks=pytest.mark.gpu)
SERVING = RuntimeConfig(
    max_batch_requests=4,
    prefill_chunk_tokens=24,
    max_model_tokens=256,
    kv_cache_mb=8,
    prefix_cache_mb=2,
    num_threads=1,
)


def build(backend: str, folder: Path, config: RuntimeConfig = SERVING) -> None:
    """Make `folder`/engines from `folder`/onnx."""
    if backend == "stand-in":
        fake_tensorrt.build_plans(folder, config)
    else:
        build_engines(folder, backend, config)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The stand-in's runtime, where the test is to run on it."""
    if request.getfixturevalue("backend") == "stand-in":
        fake_tensorrt.install(monkeypatch)


@pytest.fixture
def built(backend: str, stand_in: None, tiny_pair_build: Path, tmp_path: Path) -> Path:
    """build/<name> of the tiny pair with engines of `backend`."""
    for name in ("hf", "onnx"):
        shutil.copytree(tiny_pair_build / name, tmp_path / name)
    build(backend, tmp_path)
    return tmp_path


# Parity


def through(engine: Engine, kv: KvDims, num_blocks: int) -> Run:
    """`engine` as the parity checks call it: pools go in and new K/V come out like other tensors.

    The engine has `num_blocks` blocks; those behind the given pools take the new K/V.
    """
    dtype, row = TORCH_DTYPES[kv.dtype], (kv.block_tokens, kv.num_kv_heads, kv.head_dim)

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pools = torch.stack([inputs[spec.name] for spec in kv.pool_specs()], dim=1)
        for block, layers in enumerate(pools):
            engine.write_block(block, layers.contiguous().view(torch.uint8).flatten().numpy())
        names = inputs.keys() - {spec.name for spec in kv.pool_specs()}
        found = engine.run({name: inputs[name].numpy() for name in names})
        outputs = {name: torch.from_numpy(array.copy()) for name, array in found.items()}
        rows = np.arange(int(inputs["segment_lens"].sum()))
        engine.commit(rows, len(pools) * kv.block_tokens + rows)
        spare = range(len(pools), num_blocks)
        raw = torch.from_numpy(np.stack([engine.read_block(block) for block in spare]))
        layers = raw.view(dtype).view(len(spare), 2 * kv.num_layers, *row).transpose(0, 1)
        new = layers.flatten(1, 2)[:, : len(rows)]
        return outputs | {s.name: n for s, n in zip(kv.new_specs("N"), new, strict=True)}

    return run


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("stand-in", "fp32"),
        *(pytest.param("tensorrt", d, marks=pytest.mark.gpu) for d in ("fp32", "fp16", "bf16")),
    ],
)
def test_engines_compute_what_the_checkpoints_compute(
    backend: str, dtype: Dtype, stand_in: None, tiny_pair_build: Path, tmp_path: Path
) -> None:
    """The export's own parity check, on the engines and through their pools."""
    model, drafter = tiny_pair_build / "hf", tiny_pair_build.parent / "drafter"
    folder = tmp_path / "pair"
    if dtype == "fp32":
        shutil.copytree(tiny_pair_build / "onnx", folder / "onnx")
    else:
        export_pair(ExportOptions(str(model), "pair", dtype, drafter, build_dir=tmp_path))
    build(backend, folder, replace(SERVING, max_batch_requests=32))  # a prefill with all logits
    manifest = load_manifest(folder / "engines")
    num_blocks = 54
    engines = load_engines(folder / "engines", manifest, num_blocks, threads=1)
    atol = DEFAULT_ATOL[dtype]
    run = through(engines.verifier, manifest.verifier.kv, num_blocks)
    verifier_parity(run, manifest.verifier, model, atol=atol).check()

    assert manifest.drafter is not None
    assert engines.drafter is not None
    target, target_weights = load_target(model)
    module = Drafter(
        *load_drafter(drafter, target),
        target,
        target_weights,
        dtype=TORCH_DTYPES[dtype],
        block_tokens=manifest.drafter.kv.block_tokens,
    )
    reference = module_runner(module.eval(), drafter_outputs(manifest.drafter))
    run = through(engines.drafter, manifest.drafter.kv, num_blocks)
    vocab_size = manifest.verifier.vocab_size
    drafter_parity(run, reference, manifest.drafter, vocab_size, atol=atol).check()
    engines.close()


# Edges of the profiles


def verify_steps(model: Model, phase: str) -> list[dict[str, NDArray]]:
    """The least and the greatest steps of a phase, from which contexts they may."""
    limits, dims = model.manifest.serving_limits, model.manifest.verifier
    sizes = profiles(model.manifest, limits)["verifier"][phase]
    requests, length, tokens, rows = (sizes[s].max for s in "RSNL")
    short = tokens // requests
    longest = limits["max_model_tokens"]
    shapes = {
        "decode": [(1, 1, 0, 1), (requests, length, longest - length, length)],
        "prefill": [(1, 1, 0, 0), (1, length, longest - length, 1), (requests, short, 0, 1)],
    }[phase]
    assert (requests * length, requests * length) == (tokens, rows) or phase == "prefill"
    random = np.random.default_rng(0)
    steps = []
    for count, tokens_each, context, wanted in shapes:
        ids = random.integers(0, dims.vocab_size, (count, tokens_each)).tolist()
        needed = blocks_for(context + tokens_each, dims.kv.block_tokens)
        blocks = [random.integers(0, model.num_blocks, needed).tolist() for _ in ids]
        segments = [VerifySegment(i, context, b, wanted) for i, b in zip(ids, blocks, strict=True)]
        steps.append(pack_verify(segments, dims.kv.block_tokens).inputs)
    return steps


def draft_steps(model: Model, phase: str) -> list[dict[str, NDArray]]:
    """As `verify_steps`, for the drafter, without and with a column of noise for each token."""
    dims, limits = model.manifest.drafter, model.manifest.serving_limits
    assert dims is not None
    sizes = profiles(model.manifest, limits)["drafter"][phase]
    random = np.random.default_rng(0)
    steps = []
    for count, length, width in ((1, 1, 1), (sizes["R"].max, sizes["S"].max, sizes["W"].max)):
        context = max(0, limits["max_model_tokens"] - length) if count > 1 else 0
        noise = random.gumbel(size=(dims.block_size, width)).astype(np.float32)
        needed = blocks_for(context + length, dims.kv.block_tokens)
        segments = [
            DraftSegment(
                random.normal(size=(length, dims.feature_size)).astype(np.float32),
                context,
                random.integers(0, model.num_blocks, needed).tolist(),
                3,
                DraftNoise(np.full(dims.block_size, -1.0, np.float32), noise),
                temperature=1.0,
            )
            for _ in range(count)
        ]
        steps.append(pack_draft(segments, dims.kv.block_tokens).inputs)
    return steps


@pytest.mark.parametrize("backend", ["stand-in", TENSORRT])
def test_edges_of_the_profiles(built: Path, tiny_pair_build: Path, backend: str) -> None:
    """The least and greatest steps give what ONNX Runtime gives; one beyond is refused."""
    model = Model(built / "engines", built / "hf", SERVING)
    build_engines(built, "onnxruntime")
    manifest = load_manifest(built / "engines")
    other = load_engines(built / "engines", manifest, model.num_blocks, threads=1)
    assert model.engines.drafter is not None
    assert other.drafter is not None
    for phase in ("decode", "prefill"):
        for engine, reference, steps in (
            (model.engines.verifier, other.verifier, verify_steps(model, phase)),
            (model.engines.drafter, other.drafter, draft_steps(model, phase)),
        ):
            for inputs in steps:
                outputs, expected = engine.run(inputs), reference.run(inputs)
                for name, array in expected.items():
                    np.testing.assert_allclose(outputs[name], array, atol=1e-3, err_msg=name)
    most = verify_steps(model, "decode")[-1]
    wider = {**most, "block_table": np.pad(most["block_table"], [(0, 0), (0, 2)])}
    with pytest.raises(EngineError, match=r"verifier: M is 18 .profiles: 1 to 17 or 1 to 17."):
        model.engines.verifier.run(wider)
    model.close()
    other.close()


# The whole loop


def requests(model: Model) -> list[Request]:
    """Greedy and seeded requests of many lengths; their text depends on nothing else."""
    random = np.random.default_rng(0)
    made = []
    for i, length in enumerate((1, 5, 30, 70, 3, 17)):
        fields: dict[str, Any] = {
            "prompt_ids": random.integers(3, 300, length).tolist(),
            "max_tokens": 24,
            "ignore_eos": True,
        }
        if i % 2:
            fields |= {"temperature": 0.8, "seed": i, "top_k": 20}
        made.append(validate_request(fields, model.limits))
    return made


def generate(model: Model, policy: str) -> list[list[int]]:
    loop = model.make_loop(policy)
    collectors = [Collector() for _ in range(6)]
    for request, collector in zip(requests(model), collectors, strict=True):
        loop.add(request, collector)
    while loop.has_work:
        loop.step()
    return [c.token_ids for c in collectors]


@pytest.fixture(scope="module")
def expected(tiny_pair_build: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Plain decoding of one request at a time in ONNX Runtime."""
    folder = tmp_path_factory.mktemp("plain")
    shutil.copytree(tiny_pair_build / "onnx", folder / "onnx")
    build("onnxruntime", folder)
    config = replace(SERVING, max_batch_requests=1, prefix_cache_mb=0)
    model = Model(folder / "engines", tiny_pair_build / "hf", config)
    try:
        return generate(model, "off")
    finally:
        model.close()


@pytest.mark.parametrize("backend", ["stand-in", TENSORRT])
@pytest.mark.parametrize("policy", ["off", "fixed:2", "fixed"])
def test_the_loop_gives_the_same_tokens(
    policy: str, backend: str, built: Path, expected: list[list[int]]
) -> None:
    model = Model(built / "engines", built / "hf", replace(SERVING, prefix_cache_mb=0))
    assert model.manifest.builder.name != "onnxruntime"
    assert generate(model, policy) == expected
    model.close()
    model.close()


@pytest.mark.parametrize("backend", ["stand-in"])
def test_asking_for_more_than_was_built_is_refused(built: Path, backend: str) -> None:
    with pytest.raises(ConfigError, match=r"max_batch_requests .* at most 4, .* got 5: .*SERVING"):
        Model(built / "engines", built / "hf", replace(SERVING, max_batch_requests=5))


@pytest.mark.parametrize("backend", ["stand-in"])
def test_the_gpus_memory_bounds_the_cache(
    built: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 20, 1 << 40))
    model = Model(built / "engines", built / "hf", SERVING)
    config = replace(SERVING, prefix_cache_mb=0)
    assert model.num_blocks == Model(built / "engines", built / "hf", config).num_blocks


@pytest.mark.parametrize("backend", ["stand-in", TENSORRT])
def test_measures_stay_within_what_was_built(built: Path, backend: str) -> None:
    """Fewer requests and shorter prefills than by default."""
    assert profile(built, threads=1, max_requests=16, repeats=1)
    assert calibrate(built, threads=1, num_rounds=8)
    manifest = load_manifest(built / "engines")
    assert load_cost(built / "engines", manifest, threads=1, max_requests=4).requests[-1] == 4
