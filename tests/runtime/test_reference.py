"""The whole loop on real graphs against what DeepSpec's own code computed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.prompts import run_requests
from runtime.config import RuntimeConfig
from runtime.decoder import Model
from runtime.request import Request, validate_request
from tests.helpers import load_golden, make_tiny_tokenizer, shared_data_dir

pytestmark = pytest.mark.slow


HEADS = ("vanilla", "gated", "rnn", "dflash")
ON_GPU = [pytest.param((head, "tensorrt"), marks=pytest.mark.gpu) for head in HEADS]


@pytest.fixture(scope="module", params=[*((head, "onnxruntime") for head in HEADS), *ON_GPU])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A built golden pair and its head's name."""
    from engines.build import build_engines
    from export.pair import ExportOptions, export_pair

    head, target = request.param
    source, root = shared_data_dir() / "golden", tmp_path_factory.mktemp("golden")
    shutil.copytree(source / "target", root / "target", copy_function=shutil.copyfile)
    (root / "target").chmod(0o755)
    make_tiny_tokenizer(root / "target")
    options = ExportOptions(
        model=str(root / "target"),
        name="golden",
        drafter=source / head,
        build_dir=root,
    )
    export_pair(options)
    build_engines(root / "golden", target)
    config = RuntimeConfig(num_threads=1, kv_cache_mb=16)
    model = Model(root / "golden" / "engines", root / "golden" / "hf", config)
    yield model, head
    model.close()


def test_golden_outputs_under_every_policy(golden: tuple[Model, str]) -> None:
    """Plain greedy decoding of the golden target, alone and together, whatever is verified."""
    model, head = golden
    prompts = load_golden(head)
    requests = [
        validate_request(
            {"prompt_ids": p.prompt, "max_tokens": len(p.output), "ignore_eos": True}, model.limits
        )
        for p in prompts
    ]
    expected = [p.output.tolist() for p in prompts]
    assert model.manifest.drafter is not None
    for policy in ["off", *(f"fixed:{k}" for k in range(model.manifest.drafter.block_size + 1))]:
        alone = [run_requests(model.make_loop(policy), [request])[0] for request in requests]
        together = run_requests(model.make_loop(policy), requests)
        assert alone == expected, policy
        assert together == expected, policy


class Recorder:
    """Stands before a drafter and keeps what it proposes."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.draft_ids: list[NDArray[np.int64]] = []
        self.confidence_logits: list[NDArray[np.float32]] = []

    def run(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        outputs: dict[str, NDArray] = self._drafter.run(inputs)
        self.draft_ids.append(outputs["draft_ids"][0].copy())
        self.confidence_logits.append(outputs["confidence_logits"][0].copy())
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def test_embedded_model_with_the_early_drafter_round_by_round(early_build: Path) -> None:
    """Outputs, draft ids and accepted counts equal the reference's, confidences within fp16."""
    reference = np.load(shared_data_dir() / "drafter_smollm2_early" / "reference.npz")
    # One chunk for each prompt, so that the drafter runs once a round and never for context alone.
    config = RuntimeConfig(max_batch_requests=1, prefill_chunk_tokens=1024)
    model = Model(early_build / "engines", early_build / "hf", config)
    recorder = Recorder(model.engines.drafter)
    model.engines.drafter = recorder
    names = sorted(k.removesuffix("_prompt") for k in reference if k.endswith("_prompt"))
    assert len(names) == 8
    for name in names:
        output = reference[f"{name}_output"].tolist()
        recorder.draft_ids.clear()
        recorder.confidence_logits.clear()
        request = validate_request(
            {
                "prompt_ids": reference[f"{name}_prompt"],
                "max_tokens": len(output),
                "stream": True,
                "ignore_eos": True,
            },
            model.limits,
        )
        tokens, accepted = _run_rounds(model, request)
        assert tokens == output, name
        rounds = len(accepted)
        # The last round may be cut by max_tokens, which the reference applies afterwards.
        assert accepted[:-1] == reference[f"{name}_accepted"][: rounds - 1].tolist(), name
        drafted = len(recorder.draft_ids)  # not where a single token remained
        assert drafted in (rounds, rounds - 1), name
        drafts = np.stack(recorder.draft_ids)
        assert (drafts == reference[f"{name}_draft_ids"][:drafted]).all(), name
        np.testing.assert_allclose(
            np.stack(recorder.confidence_logits),
            reference[f"{name}_confidence_logits"][:drafted],
            atol=2e-2,
            err_msg=name,
        )
    model.close()


def _run_rounds(model: Model, request: Request) -> tuple[list[int], list[int]]:
    """Output tokens, and the accepted draft tokens of each decoding round."""
    outputs: list[Any] = []
    loop = model.make_loop("fixed")
    loop.add(request, outputs.append)
    while loop.has_work:
        loop.step()
    tokens = [i for output in outputs for i in output.token_ids]
    return tokens, [output.origins.count("draft") for output in outputs[1:]]
