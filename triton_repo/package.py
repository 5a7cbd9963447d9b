"""Packages build/<name>/{engines,hf} as a Triton model repository in build/<name>/repository.

The repository holds everything but third-party packages and can be moved or copied as a whole:

    repository/dspark/config.pbtxt
    repository/dspark/1/model.py
    repository/dspark/1/{runtime,triton_repo}/   sources
    repository/dspark/1/engines/                 the engine folder
    repository/dspark/1/tokenizer/               tokenizer and chat template
    repository/dspark_unary/                     forwards to it, for clients without streams

Engine files are hard links where the file system allows, so packaging costs neither time nor space.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import runtime
from export.publish import content_key, link_or_copy, publish
from runtime.manifest import (
    FILE_NAME,
    TENSORRT,
    Manifest,
    hash_file,
    load_manifest,
    tokenizer_hash,
)
from triton_repo.contract import MODEL_NAME, UNARY_MODEL_NAME, render_config

_SOURCES = Path(__file__).parent
_BRIDGE_FILES = ("__init__.py", "bridge.py", "contract.py", "watchdog.py")  # model.py's
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


class PackageError(Exception):
    """The repository cannot be packaged; the message names the command that helps."""


def package(build_dir: Path) -> bool:
    """Make `build_dir`/repository from `build_dir`/engines and `build_dir`/hf.

    Returns whether there was anything to do. Raises PackageError, ManifestError when there are no
    complete engines, PublishError when the disk is full.
    """
    engine_dir, tokenizer_dir = build_dir / "engines", build_dir / "hf"
    manifest = load_manifest(engine_dir)
    if tokenizer_hash(tokenizer_dir) != manifest.tokenizer_sha256:
        raise PackageError(
            f"the tokenizer in {tokenizer_dir} is not the one that {engine_dir} was built with: "
            "run `make engines` to build both from one checkpoint"
        )
    on_gpu = manifest.builder.name in TENSORRT
    configs = {
        MODEL_NAME: render_config(MODEL_NAME, on_gpu),
        UNARY_MODEL_NAME: render_config(UNARY_MODEL_NAME),
    }
    unary = _SOURCES / "unary_model.py"
    engine_files = {
        f"engines/{name}": engine_dir / name for name in _engine_files(engine_dir, manifest)
    }
    small_files = dict(_small_files(tokenizer_dir))

    def make(repository: Path) -> None:
        version = repository / MODEL_NAME / "1"
        for path, source in (engine_files | small_files).items():
            target = version / path
            target.parent.mkdir(parents=True, exist_ok=True)
            # Sources are edited in place, and a link would change with them.
            (link_or_copy if path in engine_files else shutil.copyfile)(source, target)
        (repository / UNARY_MODEL_NAME / "1").mkdir(parents=True)
        shutil.copyfile(unary, repository / UNARY_MODEL_NAME / "1" / "model.py")
        for name, config in configs.items():
            (repository / name / "config.pbtxt").write_text(config)

    key = content_key(
        configs,
        hash_file(unary),
        manifest.to_json(),  # carries the hashes of the large files
        {path: hash_file(source) for path, source in small_files.items()},
        [hash_file(engine_dir / name) for name in _measurements(engine_dir, manifest)],
    )
    return publish(build_dir / "repository", key, make)


def _small_files(tokenizer_dir: Path) -> Iterator[tuple[str, Path]]:
    """Path in the version folder and source of each file that is copied."""
    yield "model.py", _SOURCES / "model.py"
    for name in _BRIDGE_FILES:
        yield f"triton_repo/{name}", _SOURCES / name
    runtime_dir = Path(runtime.__path__[0])
    for source in sorted(runtime_dir.rglob("*.py")):
        yield f"runtime/{source.relative_to(runtime_dir).as_posix()}", source
    for name in _TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            yield f"tokenizer/{name}", tokenizer_dir / name


def _engine_files(engine_dir: Path, manifest: Manifest) -> list[str]:
    """Everything the manifest names, relative to the engine folder, and the manifest itself."""
    names = [FILE_NAME, *_measurements(engine_dir, manifest)]
    for artifact in manifest.artifacts.values():
        names += [artifact.path, *artifact.data_files]
    return names


def _measurements(engine_dir: Path, manifest: Manifest) -> list[str]:
    """Those that were made: engines serve without them too."""
    names = [name for name in (manifest.cost, manifest.calibration) if name]
    return [name for name in names if (engine_dir / name).is_file()]
