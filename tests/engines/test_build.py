"""Engine folders: linked from the export, loaded once, rebuilt only when something changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from cli.main import main
from engines.build import build_engines
from runtime.manifest import Artifact, Builder, Manifest, hash_file, load_manifest
from runtime.spec import KvDims, VerifierDims


def graph(path: Path, dtype: int = TensorProto.FLOAT) -> None:
    """y = x x^T: enough of a graph to load, or not to load in bf16 on a CPU."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Gemm", ["x", "x"], ["y"], transB=1)]
    inputs, outputs = [info("x", dtype, ["N", 4])], [info("y", dtype, ["N", "N"])]
    body = helper.make_graph(nodes, "graph", inputs, outputs)
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(body, opset_imports=opset, ir_version=10), path)


def export(folder: Path, *, dtype: str = "fp32", eos: int = 2) -> None:
    """What `dspark export` would leave, with a graph of one node."""
    source = folder / "onnx"
    source.mkdir(parents=True, exist_ok=True)
    path = source / "verifier.onnx"
    path.unlink(missing_ok=True)
    graph(path, TensorProto.FLOAT if dtype == "fp32" else TensorProto.BFLOAT16)
    manifest = Manifest(
        name=folder.name,
        dtype=dtype,
        opset=20,
        builder=Builder("torch", "0"),
        verifier=VerifierDims(KvDims(1, 1, 4, 16, "fp32"), 4, 8, 32, ()),
        drafter=None,
        artifacts={"verifier": Artifact(path.name, path.stat().st_size, hash_file(path))},
        tokenizer_sha256="0",
        eos_token_ids=(eos,),
        parity={"verifier": {"argmax_agreement": 1.0}},
    )
    (source / "manifest.json").write_text(manifest.to_json())


def test_links_the_export_and_completes_its_manifest(tmp_path: Path) -> None:
    export(tmp_path)
    assert build_engines(tmp_path)
    exported, built = load_manifest(tmp_path / "onnx"), load_manifest(tmp_path / "engines")
    assert os.path.samefile(*(tmp_path / d / "verifier.onnx" for d in ("onnx", "engines")))
    assert built.builder.name == "onnxruntime"
    assert set(built.device) == {"machine", "provider"}
    assert (built.artifacts, built.parity) == (exported.artifacts, exported.parity)
    assert built.fingerprint == exported.fingerprint


def test_builds_again_only_after_a_change(tmp_path: Path) -> None:
    export(tmp_path)
    assert build_engines(tmp_path)
    (tmp_path / "engines" / "cost.json").write_text("{}")  # measured for these engines
    assert not build_engines(tmp_path)
    assert (tmp_path / "engines" / "cost.json").is_file()
    export(tmp_path, eos=3)
    assert build_engines(tmp_path)
    assert load_manifest(tmp_path / "engines").eos_token_ids == (3,)
    assert not (tmp_path / "engines" / "cost.json").exists()


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    place = ["--name", tmp_path.name, "--build-dir", str(tmp_path.parent)]
    code = main(["build", *place])
    return code, capsys.readouterr().err.splitlines()[-1]


def test_what_this_machine_cannot_run_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.build.NVIDIA_DEVICE", tmp_path / "none")
    export(tmp_path, dtype="bf16")
    code, message = run(tmp_path, capsys)
    assert code == 1
    assert "cannot run the bf16 verifier on this machine's CPUExecutionProvider" in message
    assert "--dtype fp32" in message
    assert not (tmp_path / "engines").exists()


def test_without_an_export_it_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = run(tmp_path, capsys)
    assert code == 1
    assert "run `make engines` first" in message


def test_a_damaged_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(tmp_path)
    with (tmp_path / "onnx" / "verifier.onnx").open("ab") as file:
        file.write(b"more")
    code, message = run(tmp_path, capsys)
    assert code == 1
    assert "the manifest says" in message


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(tmp_path)
    assert run(tmp_path, capsys) == (0, f"built {tmp_path / 'engines'}")
    assert run(tmp_path, capsys) == (0, f"{tmp_path / 'engines'} is up to date")
    manifest = json.loads((tmp_path / "engines" / "manifest.json").read_text())
    assert manifest["builder"]["name"] == "onnxruntime"
    with pytest.raises(SystemExit):
        main(["build", "--nam", "x"])  # abbreviations are refused
