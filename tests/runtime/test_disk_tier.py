"""Blocks on disk: found again by another process, and whatever is damaged is found out."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import disk_tier
from runtime.config import MIB, ConfigError
from runtime.disk_tier import FOLDER, MAX_QUEUED, BlockKey, DiskTier
from tests.runtime.fakes import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    greedy_reference,
    make_loop,
    make_request,
    run_all,
)

VERIFIER_BYTES, DRAFTER_BYTES = 256, 64
FILE_BYTES = 64 + VERIFIER_BYTES + DRAFTER_BYTES


def open_tier(folder: Path, budget: int = MIB) -> DiskTier:
    return DiskTier(folder, budget, VERIFIER_BYTES, DRAFTER_BYTES)


def key_of(i: int, drafted: bool = True) -> BlockKey:
    return BlockKey(i.to_bytes(32, "big"), drafted)


def payload_of(tier: DiskTier, key: BlockKey) -> Any:
    seed = int.from_bytes(key.digest, "big")
    return np.random.default_rng(seed).integers(0, 256, tier.payload_bytes(key), np.uint8)


def fill(folder: Path, keys: list[BlockKey], budget: int = MIB) -> None:
    tier = open_tier(folder, budget)
    for key in keys:
        assert tier.wants(key)
        tier.put(key, payload_of(tier, key))
        while key not in tier:
            time.sleep(0.001)
    tier.close()


def test_another_process_finds_the_blocks(tmp_path: Path) -> None:
    keys = [key_of(1), key_of(2), key_of(2, drafted=False)]
    fill(tmp_path, keys)
    tier = open_tier(tmp_path)
    for key in keys:
        payload = tier.get(key)
        assert payload is not None
        assert (payload == payload_of(tier, key)).all()
        assert not tier.wants(key)
    assert tier.get(key_of(1, drafted=False)) is None
    assert tier.get(key_of(3)) is None
    metrics = tier.metrics()
    assert metrics["prefix_cache_disk_hit_blocks_total"] == 3
    assert metrics["prefix_cache_disk_blocks"] == 3
    on_disk = sum(f.stat().st_size for f in (tmp_path / FOLDER).iterdir())
    assert metrics["prefix_cache_disk_bytes"] == on_disk
    tier.close()
    tier.close()
    assert not tier.wants(key_of(9))


@pytest.mark.parametrize("where", ["anywhere", "cut", "grown", "empty", "renamed"])
def test_a_damaged_file_is_a_miss_and_removed(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every bit of the header, and some of the payload."""
    rng = random.Random(0)
    key = key_of(5)
    fill(tmp_path, [key])
    path = tmp_path / FOLDER / key.file_name
    good = path.read_bytes()
    assert len(good) == FILE_BYTES
    if where == "anywhere":
        cases = []
        payload_bits = (rng.randrange(8 * 64, 8 * FILE_BYTES) for _ in range(200))
        for bit in [*range(8 * 64), *payload_bits]:
            flipped = bytearray(good)
            flipped[bit // 8] ^= 1 << bit % 8
            cases.append(bytes(flipped))
    else:
        other = key_of(6)
        fill(tmp_path, [other])
        foreign = (tmp_path / FOLDER / other.file_name).read_bytes()
        cases = {
            "cut": [good[:n] for n in (1, 63, 64, 200, FILE_BYTES - 1)],
            "grown": [good + b"x", good + good],
            "empty": [b""],
            "renamed": [foreign],
        }[where]
    tier = open_tier(tmp_path)
    for number, data in enumerate(cases, start=1):
        path.write_bytes(data)
        tier._add(key.file_name, len(data))
        assert tier.get(key) is None
        assert not path.exists()
        assert key not in tier
        assert tier.metrics()["prefix_cache_disk_damaged_files_total"] == number
    assert str(path) in caplog.text
    assert tier.wants(key)
    tier.close()


def test_foreign_and_unfinished_files_are_removed_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, [key_of(1)])
    folder = tmp_path / FOLDER
    strangers = ["notes.txt", f"{key_of(2).file_name}.123.tmp", "0" * 63 + ".pair"]
    for name in strangers:
        (folder / name).write_bytes(b"?")
    (folder / "a folder").mkdir()
    (tmp_path / "beside.txt").write_text("somebody else's")
    tier = open_tier(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [key_of(1).file_name, "a folder"]
    assert (tmp_path / "beside.txt").exists()
    assert tier.metrics()["prefix_cache_disk_damaged_files_total"] == 3
    for name in strangers:
        assert name in caplog.text
    tier.close()


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    keys = [key_of(i) for i in range(6)]
    budget = 3 * FILE_BYTES
    fill(tmp_path, keys[:3], budget)
    for i, key in enumerate(keys[:3]):  # file systems' clocks are coarse
        os.utime(tmp_path / FOLDER / key.file_name, ns=(0, 1_000_000_000 * (i + 1)))
    tier = open_tier(tmp_path, budget)
    assert tier.get(keys[0]) is not None
    tier.close()
    fill(tmp_path, keys[3:4], budget)  # opens it anew: the use is remembered
    tier = open_tier(tmp_path, budget)
    assert [key in tier for key in keys[:4]] == [True, False, True, True]
    assert tier.metrics()["prefix_cache_disk_bytes"] <= budget
    tier.close()
    smaller = open_tier(tmp_path, FILE_BYTES)
    assert smaller.metrics()["prefix_cache_disk_evicted_blocks_total"] == 2
    assert len(list((tmp_path / FOLDER).iterdir())) == 1
    smaller.close()


def test_a_slow_disk_costs_blocks_not_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    head = disk_tier._head

    def slow(*args: Any) -> bytes:
        assert may_write.wait(10)
        return head(*args)

    monkeypatch.setattr(disk_tier, "_head", slow)
    tier = open_tier(tmp_path)
    taken = 0
    for i in range(MAX_QUEUED + 10):
        if tier.wants(key_of(i)):
            tier.put(key_of(i), payload_of(tier, key_of(i)))
            assert not tier.wants(key_of(i)), "a queued block would be queued again"
            taken += 1
    assert taken == MAX_QUEUED
    assert tier.metrics()["prefix_cache_disk_unwritten_blocks_total"] == 10
    may_write.set()
    tier.close()  # writes what it took
    assert tier.metrics()["prefix_cache_disk_written_blocks_total"] == MAX_QUEUED


def test_a_disk_that_fails_is_told_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path)
    (tmp_path / FOLDER).rmdir()
    for i in range(3):
        tier.put(key_of(i), payload_of(tier, key_of(i)))
    tier.close()
    assert tier.metrics()["prefix_cache_disk_unwritten_blocks_total"] == 3
    assert caplog.text.count("could not be written") == 1
    assert tier.get(key_of(0)) is None


def test_a_file_that_somebody_else_removed_is_a_miss(tmp_path: Path) -> None:
    fill(tmp_path, [key_of(1)])
    tier = open_tier(tmp_path)
    (tmp_path / FOLDER / key_of(1).file_name).unlink()
    assert tier.get(key_of(1)) is None
    assert key_of(1) not in tier
    assert tier.metrics()["prefix_cache_disk_damaged_files_total"] == 0
    tier.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"prefix_cache_dir .*file cannot be used"):
        open_tier(tmp_path / "file")


PROMPT = tuple(1 + i % 7 * i % 11 for i in range(41))


def loop_over(folder: Path, **options: Any) -> Any:
    disk = DiskTier(folder, MIB, BLOCK_BYTES, BLOCK_BYTES)
    loop, _ = make_loop(max_cached=100, disk=disk, agreement=1.0, **options)
    return loop


@pytest.mark.parametrize("chunk", [3, 8, 64])
@pytest.mark.parametrize("plain", [False, True])
def test_a_restarted_loop_is_warm(tmp_path: Path, chunk: int, plain: bool) -> None:
    request = make_request(PROMPT, max_tokens=12, ignore_eos=True, disable_spec_decode=plain)
    stats = []
    for _ in range(2):
        loop = loop_over(tmp_path, prefill_chunk_tokens=chunk)
        (result,) = run_all(loop, [request])
        assert result.token_ids == greedy_reference(PROMPT, 12, False)
        stats.append(result.final.stats)
        loop.cache.close()
    assert [s["num_cached_tokens"] for s in stats] == [0, 40]
    assert stats[1]["num_accepted_draft_tokens"] == (0 if plain else 9)  # all that were drafted
    assert loop.metrics.counts["prefix_cache_hit_tokens"] == 40
    assert loop.cache.metrics()["prefix_cache_disk_hit_blocks_total"] == 40 // BLOCK_TOKENS


def test_reading_from_disk_delays_running_requests_by_one_chunk_at_most(tmp_path: Path) -> None:
    request = make_request(PROMPT, max_tokens=3, ignore_eos=True)
    loop = loop_over(tmp_path)
    run_all(loop, [request])
    loop.cache.close()
    loop = loop_over(tmp_path, prefill_chunk_tokens=8)
    reads = []
    loop.add(request, lambda _: None)
    while loop.has_work:
        before = loop.cache.metrics()["prefix_cache_disk_hit_blocks_total"]
        loop.step()
        reads.append(loop.cache.metrics()["prefix_cache_disk_hit_blocks_total"] - before)
    loop.cache.close()
    assert sum(reads) == 10
    assert max(reads) == 2


def test_damage_in_the_middle_of_a_prefix_costs_the_rest_of_it(tmp_path: Path) -> None:
    request = make_request(PROMPT, max_tokens=12, ignore_eos=True)
    loop = loop_over(tmp_path)
    run_all(loop, [request])
    victim = loop.cache._wanted(loop.add(request, lambda _: None))[4]
    loop.cache.close()
    path = tmp_path / FOLDER / BlockKey(victim, True).file_name
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    loop = loop_over(tmp_path)
    (result,) = run_all(loop, [request])
    loop.cache.close()
    assert result.token_ids == greedy_reference(PROMPT, 12, False)
    assert result.final.stats["num_cached_tokens"] == 16
    assert loop.cache.metrics()["prefix_cache_disk_damaged_files_total"] == 1
    assert path.read_bytes() != data, "it is written again"


_WRITER = """
import sys
from pathlib import Path
import numpy as np
from runtime.disk_tier import BlockKey, DiskTier
tier = DiskTier(Path(sys.argv[1]), 1 << 30, 1 << 20, 0)
print("writing", flush=True)
for i in range(10**6):
    key = BlockKey(i.to_bytes(32, "big"), False)
    while not tier.wants(key):
        pass
    tier.put(key, np.full(1 << 20, i % 251, np.uint8))
"""


def test_kill_9_during_writes_leaves_whole_files_or_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    survivors = 0
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.05 + 0.1 * rng.random())
            writer.send_signal(signal.SIGKILL)
        tier = DiskTier(tmp_path, 1 << 30, 1 << 20, 0)
        for i in range(1000):
            key = BlockKey(i.to_bytes(32, "big"), False)
            if key in tier:
                payload = tier.get(key)
                assert payload is not None, "half a file under its final name"
                assert (payload == i % 251).all()
                survivors += 1
        tier.close()
        assert not list((tmp_path / FOLDER).glob("*.tmp"))
    assert survivors
