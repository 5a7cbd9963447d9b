"""The drafter with linear layers in int8, for CPUs: faster, and the output stays exact.

Acceptance compares with the probabilities that this very graph drew from (`runtime.accept`), so
rounding can cost drafts their acceptance and never changes what the verifier would have produced.

Each row of W, one output, has a step of its own, and so has each row of x, one token: were it one
for all tokens of a call, a draft would depend on who else is drafted for. The projection of the
features stays fp32, since the largest channel of a token is 100 to 1,000 times its median one, and
so does what has few inputs, the sequential head, which would not gain.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
from onnx import NodeProto, helper

from engines.linear_graph import LinearGraph, Weights
from export.progress import say, step
from runtime.batch import DraftSegment, pack_draft
from runtime.ort_engine import OrtEngine
from runtime.randomness import DraftNoise
from runtime.sampling import softmax
from runtime.spec import DrafterDims, drafter_inputs, drafter_outputs

MIN_INPUTS = 256
LEVELS = 127  # on either side of 0
SMALLEST = np.float32(1e-30)  # in place of the largest of a row of zeros
# In total variation from drafts in fp32. At half of this the embedded model's drafts are accepted
# as often: such errors lean nowhere.
MAX_DISTANCE = 0.1
MAX_TIME = 0.95  # of a draft in fp32
NUM_REQUESTS = 8
NUM_TIMED_DRAFTS = 12


def build_int8_drafter(drafter: Path, dims: DrafterDims) -> list[Path]:
    """Write the graph in int8 beside the fp32 graph `drafter`, if it helps here.

    Returns its files: none when no layer is large enough or this machine's kernels are not faster
    or not precise (without VNNI some saturate), two when one cannot hold all weights.
    """
    target = drafter.with_stem(drafter.stem + "_int8")
    files = rewrite(drafter, target)
    if not files:
        return []
    with step("comparing drafts with linear layers in int8 and in fp32 in ONNX Runtime"):
        distance, seconds, own_seconds = _compare(drafter, target, dims)
    figures = (
        f"{1e3 * own_seconds:.1f} ms instead of {1e3 * seconds:.1f} for {NUM_REQUESTS} drafts, "
        f"{distance:.1%} apart"
    )
    if distance <= MAX_DISTANCE and own_seconds <= MAX_TIME * seconds:
        say(f"drafts are made in int8: {figures}")
        return files
    say(f"drafts stay in fp32; in int8: {figures}")
    for file in files:
        file.unlink()
    return []


def rewrite(source: Path, target: Path) -> list[Path]:
    """Write to `target` the fp32 graph `source` with its large linear layers in int8.

    Returns the files written, none when there are no such layers.
    """
    graph = LinearGraph(source)
    quantised: set[str] = set()  # inputs of several linear layers
    for node in graph.layers:
        weight, x = graph.weight(node), node.input[0]
        if weight.shape[1] < MIN_INPUTS or x == "context_features":
            continue
        nodes = [] if x in quantised else _quantise(graph, x)
        quantised.add(x)
        graph.replace(node, [*nodes, *_product(graph, node, weight)])
    return graph.write(target)


def _quantise(graph: LinearGraph, x: str) -> list[NodeProto]:
    """`x`.largest [T, 1] and `x`.levels [T, K] uint8 about 128 of x [T, K]."""
    axis, smallest = graph.store("last_axis", np.array([1])), graph.store("smallest", SMALLEST)
    return [
        helper.make_node("Abs", [x], [f"{x}.sizes"]),
        helper.make_node("ReduceMax", [f"{x}.sizes", axis], [f"{x}.largest0"], keepdims=1),
        helper.make_node("Max", [f"{x}.largest0", smallest], [f"{x}.largest"]),
        helper.make_node("Div", [x, f"{x}.largest"], [f"{x}.shares"]),
        helper.make_node("QuantizeLinear", [f"{x}.shares", *_grid(graph)], [f"{x}.levels"]),
    ]


def _grid(graph: LinearGraph) -> tuple[str, str]:
    """The step of a row whose largest is 1, and the level that stands for 0."""
    share, zero = np.float32(1 / LEVELS), np.uint8(LEVELS + 1)
    return graph.store("share", share), graph.store("zero", zero)


def _product(graph: LinearGraph, node: NodeProto, weight: Weights) -> list[NodeProto]:
    """Nodes that make `node`'s output from what `_quantise` made of its input."""
    x, output, bias = node.input[0], node.output[0], list(node.input[2:])
    row_step = np.maximum(np.abs(weight).max(axis=1), SMALLEST) / LEVELS
    levels = np.rint(weight / row_step[:, None]).astype(np.int8)
    name, (share, zero) = node.input[1], _grid(graph)
    steps = graph.store(f"{name}.steps", row_step.astype(np.float32))
    inputs = [f"{x}.levels", graph.store(f"{name}.levels", levels.T), share, steps, zero]
    product = f"{output}.product" if bias else output
    nodes = [
        helper.make_node(
            "MatMulIntegerToFloat", inputs, [f"{output}.shares"], domain="com.microsoft"
        ),
        helper.make_node("Mul", [f"{output}.shares", f"{x}.largest"], [product]),
    ]
    return [*nodes, helper.make_node("Add", [product, *bias], [output])] if bias else nodes


def _compare(drafter: Path, int8: Path, dims: DrafterDims) -> tuple[float, float, float]:
    """The mean total variation between first draft tokens after made-up contexts, and the median
    seconds of drafts in fp32 and in int8."""
    rng, length = np.random.default_rng(0), dims.kv.block_tokens
    zeros = np.zeros((dims.block_size, 1), np.float32)
    segments = [
        DraftSegment(
            features=rng.standard_normal((length, dims.feature_size), np.float32),
            context_len=0,
            blocks=[i],
            anchor_id=int(rng.integers(dims.draft_vocab_size)),
            noise=DraftNoise(zeros[:, 0], zeros),
        )
        for i in range(NUM_REQUESTS)
    ]
    inputs = pack_draft(segments, length).inputs
    engines = [
        OrtEngine(path, dims.kv, drafter_inputs(dims), drafter_outputs(dims), NUM_REQUESTS, 0)
        for path in (drafter, int8)
    ]
    probs = [softmax(engine.run(inputs)["draft_logits"][:, 0]) for engine in engines]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_TIMED_DRAFTS):
        for engine, own in zip(engines, seconds, strict=True):
            start = time.perf_counter()
            engine.run(inputs)
            own.append(time.perf_counter() - start)
    for engine in engines:
        engine.close()
    distance = float(np.abs(np.subtract(*probs)).sum(axis=1).mean() / 2)
    return distance, statistics.median(seconds[0]), statistics.median(seconds[1])
