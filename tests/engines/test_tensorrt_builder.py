"""Real TensorRT-RTX ahead-of-time builds, which need no GPU: nothing of these plans is run here.

`make test` builds the tiny pair (and all heads) and the embedded pair in a covering subset;
`make test-engines` builds every combination.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt_rtx
from onnx import TensorProto, helper

from cli.main import main
from engines.build import build_engines
from engines.graph_rules import violations
from engines.profiles import Profile, Range, profiles, serving_limits
from engines.tensorrt_builder import BuildError, PlanOptions, build_plan, find_tensorrt
from export.pair import ExportOptions, export_pair
from runtime.config import RuntimeConfig
from runtime.manifest import hash_file, load_manifest
from runtime.spec import Dtype, TensorSpec, drafter_inputs, verifier_inputs
from tests.conftest import default_drafter
from tests.helpers import (
    make_tiny_drafter,
    make_tiny_llama,
    make_tiny_tokenizer,
    shared_data_dir,
)

TARGETS = ("SM80", "SM89", "SM120")
DTYPES: tuple[Dtype, ...] = ("fp32", "fp16", "bf16")
HEADS = ("vanilla", "gated", "rnn", "none")
SERVING = RuntimeConfig(max_batch_requests=4, prefill_chunk_tokens=32, max_model_tokens=256)


def build(
    folder: Path,
    into: Path,
    targets: tuple[str, ...],
    *,
    graphs: tuple[str, ...] = ("verifier", "drafter"),
    phases: tuple[str, ...] = ("decode", "prefill"),
) -> dict[str, int]:
    """Plan sizes in bytes of the pair exported to `folder`/onnx."""
    manifest = load_manifest(folder / "onnx")
    by_graph = profiles(manifest, serving_limits(manifest, SERVING))
    assert manifest.drafter is not None
    inputs = {
        "verifier": verifier_inputs(manifest.verifier),
        "drafter": drafter_inputs(manifest.drafter),
    }
    sizes = {}
    for name in graphs:
        graph, plan = folder / "onnx" / manifest.artifacts[name].path, into / f"{name}.plan"
        chosen = [by_graph[name][phase] for phase in phases]
        build_plan(tensorrt_rtx, graph, plan, inputs[name], chosen, PlanOptions(targets))
        sizes[name] = plan.stat().st_size
    return sizes


# What one node shows

X = [TensorSpec("x", "fp32", ("N", 4))]
TEN: Profile = {"N": Range(1, 4, 10)}


def small_graph(path: Path, kind: str = "Relu", dtype: int = TensorProto.FLOAT) -> Path:
    """y = kind(x)."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node(kind, ["x"], ["y"], name=f"the_{kind.lower()}")],
        path.stem,
        [info("x", dtype, ["N", 4])],
        [info("y", dtype, ["N", 4])],
    )
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(body, opset_imports=opset, ir_version=10), path)
    return path


def build_small(
    graph: Path,
    inputs: list[TensorSpec] = X,
    sizes: Profile = TEN,
    options: PlanOptions | None = None,
    **more: Any,
) -> Path:
    plan = graph.with_suffix(".plan")
    options = options or PlanOptions(("SM80",))
    build_plan(tensorrt_rtx, graph, plan, inputs, [sizes], options, **more)
    return plan


def test_rtx_is_what_is_installed_here() -> None:
    assert find_tensorrt() is tensorrt_rtx


def test_builds_and_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = build_small(small_graph(tmp_path / "small.onnx"))
    assert plan.stat().st_size > 1000
    assert capsys.readouterr().err == ""


def test_min_above_max_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"small\.onnx: N, .*x, must have 0 <= min <= opt <= max"):
        build_small(small_graph(tmp_path / "small.onnx"), sizes={"N": Range(8, 4, 2)})


def test_a_profile_without_a_dimension_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"the profile lacks N, a dimension of x"):
        build_small(small_graph(tmp_path / "small.onnx"), sizes={"R": Range(1, 1, 1)})


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    inputs = [*X, TensorSpec("position_ids", "int64", ("N",))]
    with pytest.raises(BuildError, match=r"inputs .*differing: position_ids\): run `make engines`"):
        build_small(small_graph(tmp_path / "small.onnx"), inputs=inputs)


def test_a_broken_rule_names_node_and_rule(tmp_path: Path) -> None:
    graph = small_graph(tmp_path / "small.onnx", "RandomNormalLike")
    with pytest.raises(BuildError, match=r"node the_randomnormallike \(Random.*ignores seeds"):
        build_small(graph)
    assert not graph.with_suffix(".plan").exists()


def test_what_the_parser_does_not_know_is_told_in_its_words(tmp_path: Path) -> None:
    """Det is ONNX and breaks no rule of ours, but TensorRT has no such layer."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Det", ["x"], ["y"], name="the_det")],
        "det",
        [info("x", TensorProto.FLOAT, ["N", 4, 4])],
        [info("y", TensorProto.FLOAT, ["N"])],
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "det.onnx")
    inputs = [TensorSpec("x", "fp32", ("N", 4, 4))]
    with pytest.raises(BuildError, match=r"cannot parse det\.onnx: node the_det \(Det\): "):
        build_small(tmp_path / "det.onnx", inputs=inputs)


def test_an_unused_input_fails_the_build(tmp_path: Path) -> None:
    path = small_graph(tmp_path / "small.onnx")
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N"]))
    onnx.save(model, path)
    with pytest.raises(BuildError, match=r"cannot build small\.onnx: .*Unused Input: z"):
        build_small(path, inputs=[*X, TensorSpec("z", "fp32", ("N",))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(("SM90",)), "ComputeCapability must be one of .*SM89.*, got 'SM90'"),
        (PlanOptions(("SM80",), hardware_compatibility="all"), "must be one of .*, got 'ALL'"),
        (PlanOptions(("SM80",), hardware_compatibility="ampere_plus"), "does not take the hardw"),
    ],
)
def test_options_that_are_not_taken_are_refused(
    options: PlanOptions, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=message):
        build_small(small_graph(tmp_path / "small.onnx"), options=options)


def test_a_workspace_limit_is_taken(tmp_path: Path) -> None:
    options = PlanOptions(("SM80",), workspace_mb=256)
    assert build_small(small_graph(tmp_path / "small.onnx"), options=options).exists()


def test_bf16_is_refused_for_turing(tmp_path: Path) -> None:
    graph = small_graph(tmp_path / "small.onnx", dtype=TensorProto.BFLOAT16)
    inputs = [TensorSpec("x", "bf16", ("N", 4))]
    assert build_small(graph, inputs=inputs).exists()
    with pytest.raises(BuildError, match=r"cannot build small\.onnx: .*sm75.*b16"):
        build_small(graph, inputs=inputs, options=PlanOptions(("SM75",)))


def test_a_timing_cache_is_written_and_a_foreign_one_replaced(tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    for before in (None, b"not a cache"):
        if before is not None:
            cache.write_bytes(before)
        build_small(small_graph(tmp_path / "small.onnx"), timing_cache=cache)
        assert cache.stat().st_size > 20
    assert sorted(p.name for p in tmp_path.glob("timing*")) == ["timing.cache"]


# The folder of engines


@pytest.fixture
def exported(tiny_pair_build: Path, tmp_path: Path) -> Path:
    """The tiny pair's export, in a build folder to change."""
    shutil.copytree(tiny_pair_build / "onnx", tmp_path / "tiny" / "onnx")
    return tmp_path / "tiny"


@pytest.mark.slow
def test_make_engines_target_tensorrt(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command, what it leaves, that it does nothing twice, and what it says of failure."""
    place = ["--name", "tiny", "--build-dir", str(exported.parent)]
    serving = exported.parent / "serving.json"
    serving.write_text(json.dumps({"max_batch_requests": 2, "prefill_chunk_tokens": 16}))
    command = ["build", *place, "--target", "tensorrt", "--config", str(serving)]
    command += ["--compute-capability", "sm80,SM120"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert f"building with tensorrt_rtx {tensorrt_rtx.__version__} for SM80, SM120" in said
    manifest = load_manifest(exported / "engines")
    assert manifest.builder.name == "tensorrt_rtx"
    assert manifest.builder.version == tensorrt_rtx.__version__
    assert manifest.device["compute_capabilities"] == ["SM80", "SM120"]
    assert manifest.serving_limits["max_batch_requests"] == 2
    for name in ("verifier", "drafter"):
        artifact = manifest.artifacts[name]
        plan = exported / "engines" / artifact.path
        assert artifact.path == f"{name}.plan"
        assert artifact.bytes == plan.stat().st_size
        assert artifact.sha256 == hash_file(plan)
    assert (exported / "engines" / manifest.artifacts["draft_vocab"].path).is_file()
    assert not (exported / "engines" / "verifier.onnx").exists()

    assert main(command) == 0
    assert "is up to date" in capsys.readouterr().err

    serving.write_text(json.dumps({"max_batch_request": 2}))
    assert main(command) == 1
    assert "unknown option 'max_batch_request'" in capsys.readouterr().err
    other = [*command[:-4], "--compute-capability", "SM90"]
    assert main(other) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("dspark build: ComputeCapability")
    assert load_manifest(exported / "engines") == manifest  # what was there stays


def test_the_full_product_needs_its_gpu(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TensorRT:
        __name__ = "tensorrt"
        __version__ = "10.13.3.9"

    monkeypatch.setattr("engines.build.find_tensorrt", TensorRT)
    monkeypatch.setattr("engines.build.NVIDIA_DEVICE", exported / "none")
    with pytest.raises(BuildError, match=r"tensorrt 10\.13\.3\.9 builds on the NVIDIA GPU"):
        build_engines(exported, "tensorrt")


def test_without_any_tensorrt_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BuildError, match=r"neither tensorrt nor tensorrt_rtx .*make install"):
        find_tensorrt()


# The project's graphs


@pytest.mark.slow
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "dflash"])
def test_every_head_builds(head: str, tmp_path: Path) -> None:
    """fp32, for all three GPUs in one plan; one that cannot be built for fails the whole."""
    golden = shared_data_dir() / "golden"
    shutil.copytree(golden / "target", tmp_path / "target", copy_function=shutil.copyfile)
    (tmp_path / "target").chmod(0o755)
    make_tiny_tokenizer(tmp_path / "target")
    model = str(tmp_path / "target")
    export_pair(ExportOptions(model, "pair", drafter=golden / head, build_dir=tmp_path))
    graphs = ("verifier", "drafter") if head == "vanilla" else ("drafter",)
    assert build(tmp_path / "pair", tmp_path, TARGETS, graphs=graphs, phases=("decode",))


def half_pair(root: Path, head: str, dtype: Dtype) -> Path:
    """build/<name> of a tiny pair in `dtype`; a short block, whose unrolled head traces faster."""
    if not (root / "model").exists():
        make_tiny_llama(root / "model")
    drafter = make_tiny_drafter(root / f"{head}_drafter", head=head, block_size=2)
    options = ExportOptions(
        str(root / "model"), dtype, dtype=dtype, drafter=drafter, build_dir=root
    )
    export_pair(options)
    return root / dtype


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def embedded_in(dtype: Dtype, embedded_build: Path) -> Path:
    """build/<name> of the embedded pair in `dtype`."""
    folder = embedded_build.with_name(f"{embedded_build.name}_{dtype}")
    command = ["export", "--model", str(embedded_build / "hf"), "--name", folder.name]
    assert main([*command, "--dtype", dtype, *default_drafter()]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_builds_in_half_precision(
    head: str, dtype: Dtype, tiny_root: Path, tmp_path: Path
) -> None:
    folder = half_pair(tiny_root, head, dtype)
    graphs = ("verifier", "drafter") if head == "vanilla" else ("drafter",)
    for graph in graphs:
        assert violations(folder / "onnx" / f"{graph}.onnx") == []
    build(folder, tmp_path, TARGETS, graphs=graphs, phases=("decode",))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedded_pair_builds(dtype: Dtype, embedded_build: Path, tmp_path: Path) -> None:
    """At full size; the plans hold at least the weights."""
    folder = embedded_build if dtype == "fp32" else embedded_in(dtype, embedded_build)
    for name, size in build(folder, tmp_path, TARGETS, phases=("decode",)).items():
        assert size > load_manifest(folder / "onnx").artifacts[name].bytes


@pytest.mark.engines
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", HEADS)
def test_tiny_in_every_combination(
    head: str, dtype: Dtype, tiny_root: Path, tmp_path: Path
) -> None:
    folder = half_pair(tiny_root, head, dtype)
    for target in TARGETS:
        build(folder, tmp_path, (target,))


@pytest.mark.engines
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedded_in_every_combination(dtype: Dtype, embedded_build: Path, tmp_path: Path) -> None:
    folder = embedded_in(dtype, embedded_build)
    for target in TARGETS:
        build(folder, tmp_path, (target,))
