"""Engines as models of their own: configurations that Triton can read, inputs that fit them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from runtime.engine import check_inputs
from runtime.manifest import Artifact, Builder, Manifest, load_manifest
from runtime.spec import drafter_inputs, drafter_outputs, verifier_inputs, verifier_outputs
from tests.runtime.fakes import manifest
from triton_repo.contract import MODEL_NAME, UNARY_MODEL_NAME, render_config
from triton_repo.standalone import example_steps, package_standalone, render_engine

NUMPY = {"TYPE_INT64": np.int64, "TYPE_FP32": np.float32, "TYPE_FP16": np.float16}


def parsed(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def built(name: str) -> Manifest:
    suffix = "onnx" if name == "onnxruntime" else "plan"
    artifacts = {g: Artifact(f"{g}.{suffix}", 1, "0") for g in ("verifier", "drafter")}
    return replace(manifest(), builder=Builder(name, "1"), artifacts=artifacts)


@pytest.mark.parametrize(
    ("builder", "platform", "kind"),
    [
        ("onnxruntime", "onnxruntime_onnx", "KIND_AUTO"),
        ("tensorrt", "tensorrt_plan", "KIND_GPU"),
    ],
)
def test_configuration_names_every_tensor(builder: str, platform: str, kind: str) -> None:
    m = built(builder)
    assert m.drafter is not None
    for name, inputs, outputs in (
        ("verifier", verifier_inputs(m.verifier), verifier_outputs(m.verifier)),
        ("drafter", drafter_inputs(m.drafter), drafter_outputs(m.drafter)),
    ):
        config = parsed(render_engine(name, m, inputs, outputs))
        assert (config.name, config.platform) == (name, platform)
        assert config.default_model_filename == m.artifacts[name].path
        assert [t.name for t in config.input] == [s.name for s in inputs]
        assert [t.name for t in config.output] == [s.name for s in outputs]
        (group,) = config.instance_group
        assert model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind) == kind
        pool = next(t for t in config.input if t.name == "k_pool.0")
        assert list(pool.dims) == [-1, 4, 1, 2]


def test_the_example_step_is_a_step() -> None:
    m = manifest()
    assert m.drafter is not None
    steps = example_steps(m)
    for name, inputs in (
        ("verifier", verifier_inputs(m.verifier)),
        ("drafter", drafter_inputs(m.drafter)),
    ):
        sizes = check_inputs(name, {s.name: s for s in inputs}, steps[name])
        assert sizes["R"] == 1
        assert (steps[name]["block_table"] < sizes["P"]).all()


@pytest.mark.slow
def test_packaged_files_run(tiny_pair_build: Path) -> None:
    """The bytes and shapes that perf_analyzer would send, through ONNX Runtime."""
    import onnxruntime

    assert package_standalone(tiny_pair_build)
    assert not package_standalone(tiny_pair_build)
    m = load_manifest(tiny_pair_build / "engines")
    for name in ("verifier", "drafter"):
        folder = tiny_pair_build / "standalone" / name
        config = parsed((folder / "config.pbtxt").read_text())
        words = (folder / "perf_analyzer.args").read_text().split()
        assert words[:4] == ["-m", name, "--input-data", str(folder / "inputs")]
        assert words[4::2] == ["--shape"] * len(config.input)
        shapes = dict(word.rsplit(":", 1) for word in words[5::2])
        feeds = {}
        for tensor in config.input:
            dtype = NUMPY[model_config_pb2.DataType.Name(tensor.data_type)]
            raw = np.frombuffer((folder / "inputs" / tensor.name).read_bytes(), dtype)
            feeds[tensor.name] = raw.reshape(json.loads(f"[{shapes[tensor.name]}]"))
        session = onnxruntime.InferenceSession(
            str(folder / "1" / m.artifacts[name].path), providers=["CPUExecutionProvider"]
        )
        outputs = dict(zip([t.name for t in config.output], session.run(None, feeds), strict=True))
        assert all(np.isfinite(value).all() for value in outputs.values())


def test_the_served_model_sits_on_the_gpu_where_its_engines_do() -> None:
    for on_gpu, kind, gpus in ((True, "KIND_GPU", [0]), (False, "KIND_CPU", [])):
        (group,) = parsed(render_config(MODEL_NAME, on_gpu)).instance_group
        assert model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind) == kind
        assert list(group.gpus) == gpus
        assert group.count == 1
    (group,) = parsed(render_config(UNARY_MODEL_NAME)).instance_group
    assert model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind) == "KIND_CPU"
