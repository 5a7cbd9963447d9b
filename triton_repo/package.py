"""Packages build/<name>/{engines,hf} as a Triton model repository in build/<name>/repository.

The repository holds everything but third-party packages and can be moved or copied as a whole:

    repository/dspark/config.pbtxt
    repository/dspark/1/model.py
    repository/dspark/1/{runtime,triton_repo}/   sources
    repository/dspark/1/engines/                 the engine folder
    repository/dspark/1/tokenizer/               tokenizer and chat template
    repository/dspark/1/package.json             what it was made from

Engine files are hard links where the file system allows, so packaging costs neither time nor space.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import runtime
from runtime.manifest import Manifest, hash_file, load_manifest, tokenizer_hash
from triton_repo.contract import MODEL_NAME, render_config

_SOURCES = Path(__file__).parent
_BRIDGE_FILES = ("__init__.py", "bridge.py", "contract.py")  # what model.py imports from here
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
_KEY_FILE = "package.json"


class PackageError(Exception):
    """The repository cannot be packaged; the message names the command that helps."""


def package(build_dir: Path) -> bool:
    """Make `build_dir`/repository from `build_dir`/engines and `build_dir`/hf.

    The new repository replaces the old one as a whole, when all of it is written.

    Returns whether there was anything to do. Raises PackageError, ManifestError or OSError.
    """
    engine_dir, tokenizer_dir = build_dir / "engines", build_dir / "hf"
    manifest = load_manifest(engine_dir)
    if tokenizer_hash(tokenizer_dir) != manifest.tokenizer_sha256:
        raise PackageError(
            f"the tokenizer in {tokenizer_dir} is not the one that {engine_dir} was built with: "
            "run `make engines` to build both from one checkpoint"
        )
    files = dict(_packaged_files(engine_dir, manifest, tokenizer_dir))
    key = _content_key(files, engine_dir, manifest)
    repository = build_dir / "repository"
    if _is_current(repository, key, files):
        return False
    scratch = Path(tempfile.mkdtemp(prefix=".repository-", dir=build_dir))
    try:
        scratch.chmod(0o755)  # mkdtemp's 0700 would shut out a server under another user
        _write(scratch, files, {"name": manifest.name, "key": key})
        _replace(repository, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _packaged_files(
    engine_dir: Path, manifest: Manifest, tokenizer_dir: Path
) -> Iterator[tuple[str, Path]]:
    """Path in the version folder and source of each file that is packaged as it is."""
    yield "model.py", _SOURCES / "model.py"
    for name in _BRIDGE_FILES:
        yield f"triton_repo/{name}", _SOURCES / name
    runtime_dir = Path(runtime.__path__[0])
    for source in sorted(runtime_dir.rglob("*.py")):
        yield f"runtime/{source.relative_to(runtime_dir).as_posix()}", source
    for name in _engine_files(manifest):
        yield f"engines/{name}", engine_dir / name
    for name in _TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            yield f"tokenizer/{name}", tokenizer_dir / name


def _engine_files(manifest: Manifest) -> list[str]:
    """Everything the manifest names, relative to the engine folder, and the manifest itself."""
    names = ["manifest.json"]
    for artifact in manifest.artifacts.values():
        names += [artifact.path, *artifact.data_files]
    return names + [name for name in (manifest.cost, manifest.calibration) if name]


def _content_key(files: dict[str, Path], engine_dir: Path, manifest: Manifest) -> str:
    """Hash of what the repository would hold. Artifacts count by the hash in their manifest."""
    hashed = {
        engine_dir / name
        for artifact in manifest.artifacts.values()
        for name in (artifact.path, *artifact.data_files)
    }
    digest = hashlib.sha256(render_config().encode())
    for path, source in files.items():
        digest.update(f"{path}:{'-' if source in hashed else hash_file(source)}\n".encode())
    return digest.hexdigest()


def _is_current(repository: Path, key: str, files: dict[str, Path]) -> bool:
    version = repository / MODEL_NAME / "1"
    try:
        packaged: dict[str, Any] = json.loads((version / _KEY_FILE).read_text())
    except (OSError, ValueError):
        return False
    return packaged.get("key") == key and all((version / path).is_file() for path in files)


def _write(repository: Path, files: dict[str, Path], about: dict[str, str]) -> None:
    model = repository / MODEL_NAME
    for path, source in files.items():
        target = model / "1" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.startswith("engines/"):
            _link_or_copy(source, target)
        else:
            shutil.copyfile(source, target)
    (model / "config.pbtxt").write_text(render_config())
    (model / "1" / _KEY_FILE).write_text(json.dumps(about, indent=2) + "\n")


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _replace(repository: Path, new: Path) -> None:
    """Put `new` in place of `repository`; a crash in between leaves none, never a mixture."""
    if repository.exists():
        old = Path(tempfile.mkdtemp(prefix=".repository-", dir=repository.parent))
        repository.rename(old / "old")
        new.rename(repository)
        shutil.rmtree(old)
    else:
        new.rename(repository)
