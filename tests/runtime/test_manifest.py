"""A folder that is not exactly what was built is refused with the command that rebuilds it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.manifest import (
    FORMAT,
    Artifact,
    Builder,
    Manifest,
    ManifestError,
    hash_file,
    load_manifest,
    tokenizer_hash,
)
from runtime.spec import DrafterDims, KvDims, VerifierDims

KV = KvDims(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=16, dtype="fp32")
MANIFEST = Manifest(
    name="tiny",
    dtype="fp32",
    opset=20,
    builder=Builder("onnxruntime", "1.31.1"),
    verifier=VerifierDims(KV, 8, 32, 64, (0, 2)),
    drafter=DrafterDims(KV, 16, 5, 20, True),
    artifacts={
        "verifier": Artifact("verifier.onnx", 9, "a" * 64, ("verifier.data",)),
        "drafter": Artifact("drafter.onnx", 4, "b" * 64),
    },
    tokenizer_sha256="c" * 64,
    eos_token_ids=(2, 0),
    parity={"logits_max": 1e-5},
    cost="cost.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "verifier.onnx").write_bytes(b"graph")
    (tmp_path / "verifier.data").write_bytes(b"data")
    (tmp_path / "drafter.onnx").write_bytes(b"head")
    (tmp_path / "manifest.json").write_text(MANIFEST.to_json())
    return tmp_path


def test_a_manifest_round_trips(folder: Path) -> None:
    assert load_manifest(folder) == MANIFEST


@pytest.mark.parametrize(
    ("builder", "device", "on_cpu"),
    [
        ("onnxruntime", {"provider": "CPUExecutionProvider"}, True),
        ("onnxruntime", {"provider": "CUDAExecutionProvider"}, False),
        ("tensorrt", {"compute_capabilities": ["SM86"]}, False),
        ("tensorrt_rtx", {}, False),
    ],
)
def test_the_manifest_tells_where_the_engines_run(
    builder: str, device: dict[str, Any], on_cpu: bool
) -> None:
    manifest = dataclasses.replace(MANIFEST, builder=Builder(builder, "1"), device=device)
    assert manifest.on_cpu is on_cpu


def test_a_model_without_a_drafter_round_trips(folder: Path) -> None:
    plain = dataclasses.replace(MANIFEST, drafter=None)
    (folder / "manifest.json").write_text(plain.to_json())
    assert load_manifest(folder) == plain


def refusal(folder: Path) -> str:
    with pytest.raises(ManifestError) as caught:
        load_manifest(folder)
    message = str(caught.value)
    assert "`make engines`" in message
    assert str(folder) in message
    return message


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} holds no manifest.json: run `make engines` first"


@pytest.mark.parametrize("name", ["verifier.onnx", "verifier.data", "drafter.onnx"])
def test_a_missing_file_names_its_artifact(folder: Path, name: str) -> None:
    (folder / name).unlink()
    kind = name.split(".")[0]
    assert f"lacks its {kind} ({kind}.onnx)" in refusal(folder)


@pytest.mark.parametrize("name", ["verifier.onnx", "verifier.data"])
def test_a_file_of_another_size_names_both_sizes(folder: Path, name: str) -> None:
    """A copy that was cut short would otherwise fail deep inside the engine."""
    (folder / name).write_bytes(b"x")
    size = sum((folder / f).stat().st_size for f in ("verifier.onnx", "verifier.data"))
    message = refusal(folder)
    assert f"has {size} bytes, the manifest says 9" in message
    assert "verifier.onnx" in message


def test_another_format_names_both(folder: Path) -> None:
    edit(folder, lambda data: data.update(format=FORMAT + 1))
    assert f"has format {FORMAT + 1}, this version reads {FORMAT}" in refusal(folder)
    edit(folder, lambda data: data.pop("format"))
    assert f"has format None, this version reads {FORMAT}" in refusal(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("verifier"),
        lambda data: data.pop("name"),
        lambda data: data.update(extra=1),
        lambda data: data["verifier"].update(extra=1),
        lambda data: data["verifier"]["kv"].pop("head_dim"),
        lambda data: data["drafter"].pop("kv"),
        lambda data: data["artifacts"]["verifier"].pop("sha256"),
        lambda data: data["builder"].update(extra=1),
        lambda data: data.update(eos_token_ids=2),
        lambda data: data.update(artifacts=[]),
        lambda data: data.update(verifier=None),
    ],
)
def test_unknown_missing_and_mistyped_entries(
    folder: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    edit(folder, change)
    assert "cannot be read" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_damaged_files(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    assert "cannot be read" in refusal(folder)


def test_the_fingerprint_follows_the_artifacts_alone() -> None:
    """Cached K/V of other weights must never be found; a rebuilt cost table must not lose it."""
    same = dataclasses.replace(MANIFEST, name="other", cost=None)
    assert same.fingerprint == MANIFEST.fingerprint
    reordered = dict(reversed(MANIFEST.artifacts.items()))
    assert dataclasses.replace(MANIFEST, artifacts=reordered).fingerprint == MANIFEST.fingerprint
    for name, artifact in MANIFEST.artifacts.items():
        changed = {**MANIFEST.artifacts, name: dataclasses.replace(artifact, sha256="d" * 64)}
        other = dataclasses.replace(MANIFEST, artifacts=changed)
        assert other.fingerprint != MANIFEST.fingerprint


def test_hashes(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"abc")
    assert hash_file(file) == hashlib.sha256(b"abc").hexdigest()
    alone = tokenizer_hash(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"")
    with_config = tokenizer_hash(tmp_path)
    file.write_bytes(b"abd")
    assert len({alone, with_config, tokenizer_hash(tmp_path)}) == 3
