"""`dspark bench load` against a served tiny pair that was measured: every policy, through gRPC."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import main
from runtime.config import RuntimeConfig
from tests.triton_repo.clients import free_address, generate, metrics
from triton_repo.package import package
from triton_repo.server import TritonServer

pytestmark = pytest.mark.slow

CONFIG = RuntimeConfig(kv_cache_mb=64, prefix_cache_mb=0, num_threads=1, max_batch_requests=2)


def test_policies_take_turns_on_a_running_server(measured_build: Path, tmp_path: Path) -> None:
    package(measured_build)
    prompts = tmp_path / "dogs.jsonl"
    prompts.write_text(json.dumps({"turns": ["the quick brown fox"]}) + "\n")
    report = tmp_path / "load.json"
    with TritonServer(measured_build / "repository", tmp_path, free_address(), CONFIG) as server:
        address = server.address
        assert generate(address, text_input="the dog", max_tokens=4)["finish_reason"]
        arguments = f"bench load --prompts {prompts} --grpc-port {address.grpc_port}"
        arguments += f" --metrics-port {address.metrics_port} --json {report}"
        arguments += f" --plot {tmp_path / 'load.png'} --concurrency 1,2 --slices 1 --requests 1"
        arguments += " --max-new-tokens 8 --policies off,fixed:1,threshold,throughput,lagged"
        assert main(arguments.split()) == 0
        assert metrics(address)['policy{name="throughput"}'] == 1
    results = json.loads(report.read_text())["results"]
    assert len(results) == 10
    by_key = {(r["concurrency"], r["policy"]): r for r in results}
    for concurrency in (1, 2):
        assert by_key[concurrency, "off"]["verified_per_round"] == 0
        assert by_key[concurrency, "off"]["drafted_tokens"] == 0
        assert 0 < by_key[concurrency, "fixed:1"]["verified_per_round"] <= 1
        assert len({by_key[concurrency, p]["requests"] for p in ("off", "lagged")}) == 1
    assert all(r["tokens_per_s"] > 0 for r in results)
    # A tiny model can have all of an answer ready for one response, which says nothing of its rate.
    assert any(r["user_tokens_per_s"] > 0 for r in results)
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
