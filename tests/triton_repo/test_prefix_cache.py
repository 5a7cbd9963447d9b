"""Cached prefixes through the real server, and what survives when it is killed."""

from __future__ import annotations

import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from runtime.config import RuntimeConfig
from runtime.disk_tier import FOLDER
from tests.triton_repo.clients import decoder_of, eventually, free_address, generate, metrics
from triton_repo.package import package
from triton_repo.server import Address, TritonServer

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 16
PROMPT_TOKENS = 100
CACHED_TOKENS = 96  # the last of them is computed in any case
rng = random.Random(0)
PROMPTS = [[rng.randrange(3, 320) for _ in range(PROMPT_TOKENS)] for _ in range(4)]


def answer(address: Address, prompt: list[int], **fields: Any) -> list[int]:
    reply = generate(
        address,
        prompt_ids=prompt,
        max_tokens=20,
        ignore_eos=True,
        return_output_ids=True,
        **fields,
    )
    ids: list[int] = reply["output_ids"]
    return ids


def counted(address: Address, name: str, least: int) -> int:
    eventually(lambda: metrics(address)[name] >= least)
    return metrics(address)[name]


def server_with_disk_tier(build: Path, folder: Path) -> TritonServer:
    package(build)
    config = RuntimeConfig(
        kv_cache_mb=64, num_threads=1, prefix_cache_mb=64, prefix_cache_dir=str(folder)
    )
    return TritonServer(build / "repository", folder, free_address(), config)


def test_hits_salts_opt_out_and_a_restart_after_kill_9(
    tiny_pair_build: Path, tmp_path: Path
) -> None:
    folder = tmp_path / FOLDER
    server = server_with_disk_tier(tiny_pair_build, tmp_path)
    server.log_path = Path("/dev/full")  # whose disk has no room for a log
    with server:
        address = server.address
        cold = [answer(address, prompt) for prompt in PROMPTS]
        assert counted(address, "prefix_cache_queried_tokens_total", 400) == 400
        assert metrics(address)["prefix_cache_hit_tokens_total"] == 0
        warm = [answer(address, prompt) for prompt in PROMPTS]
        assert warm == cold
        assert counted(address, "prefix_cache_hit_tokens_total", 384) == 4 * CACHED_TOKENS
        for fields in ({"cache_salt": "somebody else"}, {"disable_prefix_cache": True}):
            assert answer(address, PROMPTS[0], **fields) == cold[0]
        eventually(lambda: metrics(address)["finished_length_total"] == 10)
        assert metrics(address)["prefix_cache_hit_tokens_total"] == 4 * CACHED_TOKENS
        now = metrics(address)
        assert now["kv_blocks_free"] == now["kv_blocks"]
        assert now["prefix_cache_blocks"] >= 5 * CACHED_TOKENS // BLOCK_TOKENS
        counted(
            address, "prefix_cache_disk_written_blocks_total", 4 * CACHED_TOKENS // BLOCK_TOKENS
        )
        os.killpg(server.pid, signal.SIGKILL)

    files = sorted(folder.glob("*.pair"))
    assert len(files) >= 4 * CACHED_TOKENS // BLOCK_TOKENS
    for path in files[::3]:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: len(data) if rng.random() < 0.5 else rng.randrange(len(data))])
    (folder / "what is this").write_text("?")

    with server_with_disk_tier(tiny_pair_build, tmp_path) as server:
        address = server.address
        assert [answer(address, prompt) for prompt in PROMPTS] == cold
        log, told = server.log_path, "removed from the prefix cache's disk tier"
        # The log tells of a file at once, the metrics with the decoder's next report.
        eventually(
            lambda: (
                metrics(address)["prefix_cache_disk_damaged_files_total"]
                == log.read_text().count(told)
                >= 2
            )
        )
        assert metrics(address)["prefix_cache_disk_hit_blocks_total"] > 0
        assert not (folder / "what is this").exists()
        # What was damaged has been computed and written again.
        assert [answer(address, prompt) for prompt in PROMPTS] == cold


def test_a_full_disk_costs_stored_blocks_and_no_answer(
    tiny_pair_build: Path, tmp_path: Path
) -> None:
    """Writes fail in the decoder's process: none of its files may become as long as a block's."""
    prompt_blocks = CACHED_TOKENS // BLOCK_TOKENS
    with server_with_disk_tier(tiny_pair_build, tmp_path) as server:
        address, decoder = server.address, decoder_of(server.pid)
        expected = [answer(address, p, disable_prefix_cache=True) for p in PROMPTS]
        allowed = resource.prlimit(decoder, resource.RLIMIT_FSIZE)
        resource.prlimit(decoder, resource.RLIMIT_FSIZE, (20_000, allowed[1]))
        first, *others = PROMPTS
        for _ in range(2):  # the blocks in memory serve on
            assert [answer(address, p) for p in others] == expected[1:]
        told = len(others) * prompt_blocks
        assert counted(address, "prefix_cache_disk_unwritten_blocks_total", told) >= told
        assert metrics(address)["prefix_cache_disk_written_blocks_total"] == 0
        hits = len(others) * CACHED_TOKENS
        assert counted(address, "prefix_cache_hit_tokens_total", hits) == hits
        assert server.log_path.read_text().count("could not be written") == 1
        assert not list((tmp_path / FOLDER).iterdir())
        resource.prlimit(decoder, resource.RLIMIT_FSIZE, allowed)
        assert answer(address, first) == expected[0]
        counted(address, "prefix_cache_disk_written_blocks_total", prompt_blocks)
        assert len(list((tmp_path / FOLDER).glob("*.pair"))) >= prompt_blocks
