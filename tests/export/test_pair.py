"""`dspark export` as a whole: what it leaves, what it makes again, how it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from cli.main import main
from export import pair
from export.pair import ExportOptions, export_pair
from runtime.manifest import load_manifest
from tests.helpers import make_tiny_llama


def arguments(model: Path, build: Path, *more: str) -> list[str]:
    where = ["--name", build.name, "--build-dir", str(build.parent)]
    return ["export", "--model", str(model), *where, *more]


def test_leaves_a_complete_build_folder(exported: Path, target_dir: Path) -> None:
    visible = {p.name for p in exported.iterdir() if not p.name.startswith(".")}
    assert visible == {"hf", "onnx", "hashes.json"}
    weights = "model.safetensors"
    assert os.path.samefile(exported / "hf" / weights, target_dir / weights)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (exported / "hf" / name).read_bytes() == (target_dir / name).read_bytes()
        assert not os.path.samefile(exported / "hf" / name, target_dir / name)
    manifest = load_manifest(exported / "onnx")
    assert set(manifest.artifacts) == {"verifier", "drafter", "draft_vocab"}
    assert (manifest.name, manifest.dtype, manifest.eos_token_ids) == ("tiny", "fp32", (2, 0))
    assert manifest.drafter is not None
    assert manifest.verifier.feature_size == manifest.drafter.feature_size == 2 * 64


def test_second_run_imports_no_torch(exported: Path, target_dir: Path, drafter_dir: Path) -> None:
    """Nothing is made, and what takes seconds to import is not imported."""
    args = arguments(target_dir, exported, "--drafter", str(drafter_dir))
    code = "import sys; from cli.main import main; assert main(sys.argv[1:]) == 0; "
    code += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    before = (exported / "onnx").stat().st_mtime_ns
    result = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "up to date" in result.stderr
    assert (exported / "onnx").stat().st_mtime_ns == before


@pytest.fixture
def copy(exported: Path, target_dir: Path, drafter_dir: Path, tmp_path: Path) -> ExportOptions:
    """Options of the exported pair, whose build folder is a copy to change."""
    shutil.copytree(exported, tmp_path / "tiny", copy_function=os.link)
    model = shutil.copytree(target_dir, tmp_path / "model")
    return ExportOptions(str(model), "tiny", drafter=drafter_dir, build_dir=tmp_path)


def test_a_changed_tokenizer_keeps_the_graphs(copy: ExportOptions) -> None:
    graph = copy.folder / "onnx" / "verifier.onnx"
    before, inode = load_manifest(copy.folder / "onnx"), graph.stat().st_ino
    config = Path(copy.model) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 7}))
    export_pair(copy)
    after = load_manifest(copy.folder / "onnx")
    assert after.tokenizer_sha256 != before.tokenizer_sha256
    assert (after.artifacts, after.parity) == (before.artifacts, before.parity)
    assert graph.stat().st_ino == inode


def test_disagreement_fails_and_keeps_the_previous_export(
    copy: ExportOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(Path(copy.model), copy.folder, "--drafter", str(copy.drafter))
    before = load_manifest(copy.folder / "onnx")
    assert main([*args, "--atol", "1e-9"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("dspark export: logits differ from transformers by up to")
    assert "allowed are 1e-09: the export is not used" in message
    assert load_manifest(copy.folder / "onnx") == before


def test_without_the_drafter_the_pair_is_exported_again(
    copy: ExportOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taps are part of the verifier's graph: its key must change with the drafter's presence."""
    monkeypatch.setattr(pair._Export, "run", lambda self: (_ for _ in ()).throw(KeyError("run")))
    with pytest.raises(KeyError, match="run"):
        export_pair(ExportOptions(copy.model, "tiny", build_dir=copy.build_dir))


@pytest.mark.parametrize("model", ["nowhere", "model.gguf"])
def test_a_missing_model_is_one_sentence(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path / model, tmp_path / "build")) == 1
    assert "no model at" in capsys.readouterr().err


def test_a_damaged_gguf_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    assert main(arguments(tmp_path / "model.gguf", tmp_path / "build")) == 1
    assert "cannot be read as a GGUF model" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "build" / "hf").exists()


def test_a_refusal_names_the_folder_given_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=1)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    assert main(arguments(model, tmp_path / "build")) == 1
    message = f"dspark export: {model} uses the activation 'relu'; only 'silu' is supported"
    assert capsys.readouterr().err.splitlines()[-1] == message
    assert not (tmp_path / "build" / "hf").exists()


def test_a_name_is_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--name", "../elsewhere", "--build-dir", str(tmp_path)])
    assert "must be a plain folder name, got '../elsewhere'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_graphs(dtype: str, tmp_path: Path) -> None:
    """fp16 runs in ONNX Runtime; bf16, which has no CPU kernels, is checked as a file."""
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=1)
    assert main(arguments(model, tmp_path / "build", "--dtype", dtype)) == 0
    manifest = load_manifest(tmp_path / "build" / "onnx")
    assert 1e-4 < manifest.parity["verifier"]["differences"]["logits"]["max"] < 0.4
    graph = onnx.load(tmp_path / "build" / "onnx" / "verifier.onnx").graph
    half = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}[dtype]
    kinds = {i.name: i.type.tensor_type.elem_type for i in (*graph.input, *graph.output)}
    assert kinds["k_pool.0"] == kinds["v_new.0"] == half
    assert kinds["logits"] == onnx.TensorProto.FLOAT
