"""The drafter against DeepSpec's own results, round by round, and its sampling against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from export.checkpoint import load_drafter, load_target
from export.drafter import CANDIDATES, LEAST_DOUBT, RUN, Drafter, Sampling, inverse_cdf, sample
from export.parity import Pools, Run, drafter_parity, module_runner, onnx_runner
from export.to_onnx import drafter_to_onnx
from runtime.manifest import load_manifest
from runtime.request import RequestLimits, validate_request
from runtime.sampling import softmax, target_probs
from runtime.spec import DrafterDims, Dtype, KvDims, drafter_inputs, drafter_outputs
from tests.helpers import load_golden, make_tiny_drafter, shared_data_dir

BLOCK_TOKENS = 16
NO_FILTERS = {
    "top_k": torch.zeros(1, dtype=torch.int64),
    "top_p": torch.ones(1),
    "min_p": torch.zeros(1),
}


def load(folder: Path, target_dir: Path, dtype: Dtype = "fp32") -> tuple[Drafter, DrafterDims]:
    target, target_weights = load_target(target_dir)
    config, weights = load_drafter(folder, target)
    module = Drafter(
        config, weights, target, target_weights, dtype=torch.float32, block_tokens=BLOCK_TOKENS
    )
    decoder = config.decoder
    dims = DrafterDims(
        kv=KvDims(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, BLOCK_TOKENS, dtype),
        feature_size=len(config.target_layer_ids) * decoder.hidden_size,
        block_size=config.block_size,
        draft_vocab_size=config.draft_vocab_size,
        has_confidence=config.has_confidence,
    )
    return module, dims


def check_golden(run: Run, dims: DrafterDims, head: str) -> None:
    """Replay every round in a paged pool full of garbage."""
    generator = torch.Generator().manual_seed(0)
    for prompt in load_golden(head):
        total = sum(len(r.context_features) for r in prompt.rounds)
        pools, context = Pools(dims.kv, torch.tensor([total]), generator), 0
        for number, golden in enumerate(prompt.rounds):
            new = len(golden.context_features)
            values: dict[str, Tensor] = {
                "context_features": torch.from_numpy(golden.context_features),
                "context_position_ids": torch.arange(context, context + new),
                "pad_index": torch.arange(new)[None],
                "segment_lens": torch.tensor([new]),
                "context_lens": torch.tensor([context]),
                "block_table": pools.block_table,
                "anchor_ids": torch.tensor([golden.anchor]),
                "uniforms": torch.rand(1, dims.block_size, generator=generator),
                "noise": torch.zeros(1, dims.block_size, 1),
                "temperature": torch.zeros(1),
                **NO_FILTERS,
                **pools.tensors,
            }
            outputs = run({spec.name: values[spec.name] for spec in drafter_inputs(dims)})
            where = f"{head}, round {number}"
            assert outputs["draft_ids"][0].tolist() == golden.draft_ids.tolist(), where
            expected = {"draft_logits": golden.draft_logits}
            if golden.confidence_logits is not None:
                expected["confidence_logits"] = golden.confidence_logits
            for name, array in expected.items():
                worst = (outputs[name][0] - torch.from_numpy(array)).abs().max()
                assert worst < 1e-4, f"{where}: {name} differ by {worst}"
            for spec in dims.kv.pool_specs():
                rows = outputs[spec.name.replace("pool", "new")]
                tokens = torch.arange(context, context + new)
                blocks = pools.block_table[0, tokens // BLOCK_TOKENS]
                pools.tensors[spec.name][blocks, tokens % BLOCK_TOKENS] = rows
            context += new


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "dflash"])
def test_module_equals_golden(head: str) -> None:
    golden = shared_data_dir() / "golden"
    module, dims = load(golden / head, golden / "target")
    assert dims.has_confidence == (head != "dflash")
    check_golden(module_runner(module, drafter_outputs(dims)), dims, head)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "dflash"])
def test_graph_equals_golden(head: str, tmp_path: Path) -> None:
    golden = shared_data_dir() / "golden"
    module, dims = load(golden / head, golden / "target")
    drafter_to_onnx(module, dims, tmp_path / "drafter.onnx")
    check_golden(onnx_runner(tmp_path / "drafter.onnx"), dims, head)


def test_reduced_vocabulary_graph(exported: Path, drafter_dir: Path, target_dir: Path) -> None:
    """The graph equals its module, drafts only ids of the draft vocabulary, and says which."""
    manifest = load_manifest(exported / "onnx")
    dims = manifest.drafter
    assert dims is not None
    assert dims.draft_vocab_size == 100
    parity = manifest.parity["drafter"]
    assert parity["argmax_agreement"] == 1.0
    assert parity["differences"]["draft_logits"]["max"] < 1e-4
    assert parity["differences"]["confidence_logits"]["max"] < 1e-4
    vocab = np.load(exported / "onnx" / "draft_vocab.npy")
    config, weights = load_drafter(drafter_dir, load_target(target_dir)[0])
    assert vocab.dtype == np.int64
    assert vocab.tolist() == (weights["d2t"] + torch.arange(100)).tolist()
    inputs = random_call(dims, requests=3, temperature=[0.0, 0.7, 1.5])
    ids = onnx_runner(exported / "onnx" / "drafter.onnx")(inputs)["draft_ids"]
    assert set(ids.flatten().tolist()) <= set(vocab.tolist())
    assert config.reduced


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("own_embeddings", [True, False])
@pytest.mark.parametrize("head", ["vanilla", "none"])
def test_optional_parts_load_and_run(
    head: str, own_embeddings: bool, with_markov: bool, tmp_path: Path, target_dir: Path
) -> None:
    make_tiny_drafter(
        tmp_path, head=head, own_embeddings=own_embeddings, confidence_with_markov=with_markov
    )
    module, dims = load(tmp_path, target_dir)
    run = module_runner(module, drafter_outputs(dims))
    drafter_parity(run, run, dims, 320, atol=0.0).check()


def random_call(dims: DrafterDims, requests: int, temperature: list[float]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pools = Pools(dims.kv, torch.zeros(requests, dtype=torch.int64), generator)
    values: dict[str, Any] = {
        "context_features": torch.randn(2 * requests, dims.feature_size, generator=generator),
        "context_position_ids": torch.arange(2).repeat(requests),
        "pad_index": torch.arange(2 * requests).reshape(requests, 2),
        "segment_lens": torch.full((requests,), 2),
        "context_lens": torch.zeros(requests, dtype=torch.int64),
        "block_table": pools.block_table,
        "anchor_ids": torch.arange(requests),
        "uniforms": torch.rand(requests, dims.block_size, generator=generator),
        "noise": torch.zeros(requests, dims.block_size, 1),
        "temperature": torch.tensor(temperature),
        **{name: value.expand(requests) for name, value in NO_FILTERS.items()},
        **pools.tensors,
    }
    return {spec.name: values[spec.name] for spec in drafter_inputs(dims)}


def test_graph_samples_the_inverse_cdf(exported: Path) -> None:
    """At every temperature the draft is what numpy makes of the graph's own logits."""
    manifest = load_manifest(exported / "onnx")
    dims, vocab = manifest.drafter, np.load(exported / "onnx" / "draft_vocab.npy")
    assert dims is not None
    run = onnx_runner(exported / "onnx" / "drafter.onnx")
    temperatures = [0.0, 0.3, 1.0, 2.0]
    for seed in range(20):
        inputs = random_call(dims, requests=4, temperature=temperatures)
        generator = torch.Generator().manual_seed(seed)
        inputs["uniforms"] = torch.rand(4, dims.block_size, generator=generator)
        outputs = run(inputs)
        for r, temperature in enumerate(temperatures):
            for k in range(dims.block_size):
                logits = outputs["draft_logits"][r, k].double().numpy()
                if temperature == 0:
                    expected, margin = int(logits.argmax()), 1.0
                else:
                    weights = np.exp((logits - logits.max()) / temperature)
                    cdf = np.cumsum(weights / weights.sum())
                    u = float(inputs["uniforms"][r, k])
                    expected = int(np.searchsorted(cdf, u, side="right"))
                    margin = float(np.abs(cdf - u).min())
                if margin > 1e-5:  # nearer to a step than that, fp32 may fall on either side
                    assert outputs["draft_ids"][r, k] == vocab[expected], (seed, r, k)


def test_graph_takes_the_highest_with_noise(exported: Path) -> None:
    """Where the uniform is below 0; also beside requests sampled otherwise, and without noise."""
    manifest = load_manifest(exported / "onnx")
    dims, vocab = manifest.drafter, np.load(exported / "onnx" / "draft_vocab.npy")
    assert dims is not None
    run = onnx_runner(exported / "onnx" / "drafter.onnx")
    inputs = random_call(dims, requests=3, temperature=[0.7, 0.7, 0.0])
    plain = run(inputs)["draft_ids"]
    inputs["uniforms"][0] = -1
    noise = torch.zeros(3, dims.block_size, dims.draft_vocab_size)
    generator = torch.Generator().manual_seed(0)
    noise[0] = -torch.empty(noise[0].shape).exponential_(generator=generator).log()
    inputs["noise"] = noise
    outputs = run(inputs)
    highest = (outputs["draft_logits"][0] / 0.7 + noise[0]).argmax(-1)
    assert outputs["draft_ids"][0].tolist() == vocab[highest].tolist()
    assert (outputs["draft_ids"][1:] == plain[1:]).all()
    inputs["noise"] = torch.zeros(3, dims.block_size, 1)
    outputs = run(inputs)
    assert outputs["draft_ids"][0].tolist() == vocab[outputs["draft_logits"][0].argmax(-1)].tolist()


def sampling(count: int, temperature: float, **filters: float) -> Sampling:
    values = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    return Sampling(*(torch.tensor(v).expand(count) for v in values.values()))


def test_sampling_follows_the_distribution() -> None:
    """Frequencies over an even grid of uniforms are the probabilities."""
    logits = torch.tensor([1.0, -1.0, 0.5, -30.0, 2.0])
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    drafts, *_ = sample(logits.expand(10_000, -1), uniforms, torch.zeros(1), sampling(10_000, 0.8))
    frequencies = torch.bincount(drafts, minlength=5) / 10_000
    torch.testing.assert_close(frequencies, (logits / 0.8).softmax(-1), rtol=0, atol=2e-4)


def test_sampling_never_leaves_the_support() -> None:
    """The largest uniform lands on the last token that has any probability."""
    logits = torch.tensor([[0.0, 0.0, -1e9, -1e9], [0.0, -1e9, 0.0, -1e9]])
    below_one = torch.full((2,), float(np.nextafter(np.float32(1), np.float32(0))))
    assert sample(logits, below_one, torch.zeros(1), sampling(2, 1.0))[0].tolist() == [1, 2]
    assert sample(logits, torch.zeros(2), torch.zeros(1), sampling(2, 1.0))[0].tolist() == [0, 0]
    # A double below 1 may round to 1 on its way into the graph.
    assert sample(logits, torch.ones(2), torch.zeros(1), sampling(2, 1.0))[0].tolist() == [1, 2]


@pytest.mark.parametrize("size", [63, 64, 65, 1000])
def test_inverse_cdf_is_that_of_exact_sums(size: int) -> None:
    """Over several runs of entries, some without any weight; also at the very end of a run."""
    rng = np.random.default_rng(size)
    weights = rng.random((500, size)) ** 8
    weights[rng.random(weights.shape) < 0.5] = 0
    weights[:, size // 2] += 0.1
    weights[::3, : size // 2] = 0
    weights[:, RUN * 3 : RUN * 3 + 9] = 0
    weights = weights.astype(np.float32)
    uniforms = rng.random(500).astype(np.float32)
    uniforms[:3] = 0, np.nextafter(np.float32(1), np.float32(0)), 1
    uniforms[250:] = (weights[250:, : RUN * 3].sum(axis=1) / weights[250:].sum(axis=1)).clip(0, 1)
    drawn = inverse_cdf(torch.from_numpy(weights), torch.from_numpy(uniforms)).numpy()
    rows = np.arange(500)
    assert (weights[rows, drawn] > 0).all()
    ends = np.cumsum(weights.astype(np.float64), axis=1)
    points = uniforms * ends[:, -1]
    slack = 1e-6 * ends[:, -1]
    assert (points <= ends[rows, drawn] + slack).all()
    assert (points >= (ends - weights)[rows, drawn] - slack).all()


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    ],
)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_filters_are_the_targets(filters: dict[str, float], temperature: float) -> None:
    """The draft's distribution is what the target's own filters make of the same logits."""
    logits = torch.randn(200, 320, generator=torch.Generator().manual_seed(0)) * 3
    _, kept, _ = sample(
        logits, torch.zeros(200), torch.zeros(1), sampling(200, temperature, **filters)
    )
    limits = RequestLimits(320, 512, 1, 1, 1)
    fields = {"prompt_ids": [1], "temperature": temperature, **filters}
    request = validate_request(fields, limits)
    for row in range(200):
        expected = target_probs(logits[row].numpy(), request)
        if np.count_nonzero(expected) >= CANDIDATES:  # more than the graph looks at
            expected = softmax(logits[row].numpy() / np.float32(temperature))
        actual = softmax(kept[row].numpy() / np.float32(temperature))
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize(("temperature", "scale"), [(0.0, 1.0), (0.5, 2.0), (1.0, 1.0)])
def test_certainty_is_the_log_odds_of_the_likeliest_token(temperature: float, scale: float) -> None:
    """Of the draft's whole distribution, whatever the noise, the uniform and the filters do."""
    logits = torch.randn(50, 320, generator=torch.Generator().manual_seed(0)) * 3
    noise = torch.randn(50, 320, generator=torch.Generator().manual_seed(1))
    *_, certainty = sample(
        logits, torch.linspace(-1, 0.9, 50), noise, sampling(50, temperature, top_p=0.6)
    )
    likeliest = (scale * logits).double().softmax(dim=-1).max(dim=-1).values
    assert likeliest.max() > 0.8
    expected = torch.logit(likeliest, eps=LEAST_DOUBT).float()
    torch.testing.assert_close(certainty, expected, rtol=0, atol=0.7)  # both level off at the end
    clear = likeliest < 0.99
    torch.testing.assert_close(certainty[clear], expected[clear], rtol=0, atol=1e-3)


def test_filters_that_keep_more_than_the_candidates_keep_all() -> None:
    logits = torch.zeros(1, 320)
    _, kept, _ = sample(
        logits, torch.zeros(1), torch.zeros(1), sampling(1, 1.0, top_k=CANDIDATES + 1)
    )
    assert (kept == logits).all()
