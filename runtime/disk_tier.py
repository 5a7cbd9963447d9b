"""The disk tier of the prefix cache: blocks as files, so that a restarted server is warm.

Files are written by a thread of their own from copies in a bounded queue; when the disk cannot keep
up, blocks are not written rather than requests delayed. Each file appears whole by a rename and
carries a checksum over everything in it, so nothing needs fsync: what a crash left half done is
found out, removed and computed again. The folder is this module's own: other files in it are
removed as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import shutil
import struct
import threading
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.config import MIB, ConfigError

log = logging.getLogger("dspark")

FOLDER = "dspark-prefix-blocks"
MAX_QUEUED = 64  # blocks waiting for the writer, copies in memory
_MAGIC = b"DSPARKKV"
_FORMAT = 1
_HEADER = struct.Struct("<8sI32s?Q7x")  # magic, format, digest, drafted, payload bytes
_CHECKSUM = struct.Struct("<I")  # CRC-32 of header and payload, between the two
_NAME = re.compile(r"[0-9a-f]{64}\.(verifier|pair)")
_COUNTS = ("hit_blocks", "written_blocks", "unwritten_blocks", "evicted_blocks", "damaged_files")
_DISK_RESERVE_BYTES = 1024 * MIB  # of the file system, left to others


class BlockKey(NamedTuple):
    """Name of a cached block: its chain digest, and whether the drafter's K/V are in it too."""

    digest: bytes
    drafted: bool

    @property
    def file_name(self) -> str:
        """Name of the block's file."""
        return f"{self.digest.hex()}.{'pair' if self.drafted else 'verifier'}"


class DiskTier:
    """Blocks in `folder`/dspark-prefix-blocks, the least recently used of them removed over budget.

    Servers of different models, and several of one, may share a folder: names cannot clash, and a
    file that somebody else removed is a miss.
    """

    def __init__(
        self, folder: Path, budget_bytes: int, verifier_bytes: int, drafter_bytes: int
    ) -> None:
        """Look through the folder, without reading the files, and start the writer.

        Args:
            folder: made when it is not there.
            budget_bytes: of files, lowered to what the file system has free.
            verifier_bytes: of a block in the verifier's pool.
            drafter_bytes: of a block in the drafter's pool.

        Raises ConfigError when the folder cannot be written.
        """
        self._folder = folder / FOLDER
        self._payload_bytes = {False: verifier_bytes, True: verifier_bytes + drafter_bytes}
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes by name, oldest use first
        self._bytes = 0
        self._queued: set[BlockKey] = set()
        self._queue: queue.Queue[tuple[BlockKey, NDArray[np.uint8]] | None] = queue.Queue()
        self._counts = dict.fromkeys(_COUNTS, 0)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts, in a way
            self._scan()
        except OSError as error:
            raise ConfigError(f"prefix_cache_dir {folder} cannot be used: {error}") from error
        free = shutil.disk_usage(self._folder).free - _DISK_RESERVE_BYTES
        self.budget_bytes = max(0, min(budget_bytes, self._bytes + free))
        self._trim()
        self._thread = threading.Thread(target=self._write, name="dspark-disk", daemon=True)
        self._thread.start()

    def payload_bytes(self, key: BlockKey) -> int:
        """Bytes of such a block's K/V."""
        return self._payload_bytes[key.drafted]

    def __contains__(self, key: BlockKey) -> bool:
        return key.file_name in self._files

    def wants(self, key: BlockKey) -> bool:
        """Whether `put` would take this block: it is neither stored nor queued, and there is room.

        A block that finds the queue full is counted as unwritten.
        """
        with self._lock:
            if key in self or key in self._queued or not self._thread.is_alive():
                return False
            room = len(self._queued) < MAX_QUEUED
            self._counts["unwritten_blocks"] += not room
            return room

    def put(self, key: BlockKey, payload: NDArray[np.uint8]) -> None:
        """Queue a wanted block; `payload` [payload_bytes] is not changed afterwards."""
        assert payload.nbytes == self.payload_bytes(key)
        with self._lock:
            self._queued.add(key)
        self._queue.put((key, payload))

    def get(self, key: BlockKey) -> NDArray[np.uint8] | None:
        """A block's payload [payload_bytes], or None; a damaged file is removed."""
        if key not in self:
            return None
        path = self._folder / key.file_name
        try:
            data = path.read_bytes()
            os.utime(path)  # the order of use outlives this process
        except FileNotFoundError:  # another server over the same folder evicted it
            data = None
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            data = None
        if data is None:
            self._forget(key.file_name)
            return None
        header = _header(key, self.payload_bytes(key))
        payload = np.frombuffer(data, np.uint8)[len(header) + _CHECKSUM.size :]
        whole = len(payload) == self.payload_bytes(key)
        if not whole or data[: len(data) - len(payload)] != _head(header, payload):
            self._remove(path, "damaged")
            self._forget(key.file_name)
            return None
        with self._lock:
            self._counts["hit_blocks"] += 1
            if key.file_name in self._files:
                self._files.move_to_end(key.file_name)
        return payload

    def metrics(self) -> dict[str, float]:
        """Counters of blocks since start, and what is on disk now."""
        with self._lock:
            counts = {f"prefix_cache_disk_{n}_total": float(c) for n, c in self._counts.items()}
            return counts | {
                "prefix_cache_disk_blocks": len(self._files),
                "prefix_cache_disk_bytes": self._bytes,
            }

    def close(self) -> None:
        """Write what is queued, then stop; may be called again."""
        self._queue.put(None)
        self._thread.join()

    def _scan(self) -> None:
        found = []
        for entry in os.scandir(self._folder):
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                stat = entry.stat()
                found.append((stat.st_mtime_ns, entry.name, stat.st_size))
            elif not entry.is_dir(follow_symlinks=False):
                self._remove(Path(entry.path), "foreign or unfinished")
        for _, name, size in sorted(found):
            self._add(name, size)

    def _write(self) -> None:
        failing = False  # a full disk is told once, not for each block
        while (item := self._queue.get()) is not None:
            key, payload = item
            name = key.file_name
            temporary = self._folder / f"{name}.{os.getpid()}.tmp"
            try:
                header = _header(key, payload.nbytes)
                with temporary.open("wb") as file:
                    file.write(_head(header, payload))
                    file.write(payload.data)
                    size = file.tell()
                temporary.replace(self._folder / name)
                with self._lock:
                    self._counts["written_blocks"] += 1
                self._add(name, size)
                self._trim()
                failing = False
            except OSError as error:
                if not failing:
                    log.warning("%s could not be written: %s", temporary, error)
                failing = True
                with self._lock:
                    self._counts["unwritten_blocks"] += 1
                with contextlib.suppress(OSError):
                    temporary.unlink()
            with self._lock:
                self._queued.discard(key)

    def _trim(self) -> None:
        """Remove the least recently used files until the rest fits the budget."""
        while True:
            with self._lock:
                if self._bytes <= self.budget_bytes:
                    return
                name, size = self._files.popitem(last=False)
                self._bytes -= size
                self._counts["evicted_blocks"] += 1
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def _add(self, name: str, size: int) -> None:
        with self._lock:
            self._bytes += size - self._files.pop(name, 0)
            self._files[name] = size

    def _forget(self, name: str) -> None:
        with self._lock:
            self._bytes -= self._files.pop(name, 0)

    def _remove(self, path: Path, why: str) -> None:
        log.warning("removed from the prefix cache's disk tier, %s: %s", why, path)
        with self._lock:
            self._counts["damaged_files"] += 1
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error)


def _header(key: BlockKey, payload_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, _FORMAT, key.digest, key.drafted, payload_bytes)


def _head(header: bytes, payload: NDArray[np.uint8]) -> bytes:
    """Everything of a file before its payload."""
    return header + _CHECKSUM.pack(zlib.crc32(payload.data, zlib.crc32(header)))
