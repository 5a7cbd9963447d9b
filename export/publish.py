"""Folders that appear whole or not at all, keyed by what they were made from.

`publish` makes a folder's contents beside it, flushes them to the disk and renames. A folder that
already carries the wanted key, and all its files, is left alone, so a second run costs nothing; an
interrupted run leaves the previous folder in place.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from export.errors import PublishError

KEY_FILE = ".key"
MIB = 1 << 20


def content_key(*parts: Any) -> str:
    """A hash over JSON-able `parts`, the identity of what is made from them."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def published_key(folder: Path) -> str | None:
    """The key of a published folder; None when it is not there or files of it are gone or cut."""
    try:
        label = json.loads((folder / KEY_FILE).read_text())
        whole = all((folder / n).stat().st_size == size for n, size in label["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return str(label["key"]) if whole else None


def publish(folder: Path, key: str, make: Callable[[Path], None]) -> bool:
    """Let `folder` hold what `make` writes into the empty folder it is given, labelled `key`.

    Returns False without calling `make` when the folder already has this key. While `make` runs,
    `folder` still holds its previous contents. Concurrent calls for one folder take turns.
    Raises PublishError when the disk is full; whatever `make` raises passes through. In both cases
    `folder` is as it was.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    previous = folder.with_name(f".{folder.name}.previous")
    try:
        with _lock(folder.with_name(f".{folder.name}.lock")):
            _recover(folder, partial, previous)
            if published_key(folder) == key:
                return False
            try:
                partial.mkdir()
                make(partial)
                files = {
                    str(p.relative_to(partial)): p.stat().st_size
                    for p in sorted(partial.rglob("*"))
                    if p.is_file()
                }
                label = json.dumps({"key": key, "files": files}, indent=2)
                (partial / KEY_FILE).write_text(label + "\n")
                _flush(partial)
                if folder.exists():
                    folder.rename(previous)
                partial.rename(folder)
                _flush_directory(folder.parent)
            finally:
                _recover(folder, partial, previous)
            return True
    except Exception as error:
        if _is_disk_full(error, folder.parent):
            free = shutil.disk_usage(_existing(folder)).free // MIB
            raise PublishError(
                f"the disk is full while writing {folder} ({free} MiB free): "
                "free some space and run the command again"
            ) from error
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Put `source`'s contents at `target`: a hard link where possible, else a copy."""
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)


def _recover(folder: Path, partial: Path, previous: Path) -> None:
    """Undo what an interrupted `publish` left: at any point one of the folders is complete."""
    if previous.exists():
        if folder.exists():
            shutil.rmtree(previous)
        else:
            previous.rename(folder)
    if partial.exists():
        shutil.rmtree(partial)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_directory(path)
    _flush_directory(folder)


def _flush_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _is_disk_full(error: Exception, folder: Path) -> bool:
    """Whether an error means a full disk; writers in other languages lose the error number."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error)
