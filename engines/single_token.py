"""The verifier once more, for steps of a single token: its linear weights in few bits, no loss.

A step of one token is spent reading weights. Those of a checkpoint in 4-bit or 8-bit blocks (GGUF's
Q4_0, Q4_1, Q4_K, Q8_0) were exported as fp32, but in every 32 of a row they still are
w = d * q + m with few q. These grids are found again from the values alone, whatever file they came
from, and ONNX Runtime's MatMulNBits multiplies with q. The result differs from the fp32 graph's by
rounding alone:

- 4 bits: x W^T = x (d (q - 8))^T + s (m + 8 d)^T, where s are the sums of x over each block. The
  first term is MatMulNBits in fp32 arithmetic, the second a small Gemm.
- 8 bits: MatMulNBits in integer arithmetic, which rounds x to 8 bits a block. So x comes as a sum
  of three rows of 8 bits each, all 24 of its bits, and the three results are added.

For two and more tokens MatMulNBits unpacks the weights first, and the fp32 graph is as fast or
faster.
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from engines.linear_graph import LinearGraph, Weights
from export.progress import say, step
from runtime.batch import VerifySegment, pack_verify
from runtime.manifest import SINGLE_TOKEN
from runtime.ort_engine import OrtEngine
from runtime.spec import VerifierDims, verifier_inputs, verifier_outputs

BLOCK = 32  # weights that share d and m, along a row
STEP_TYPES = (
    np.float16,
    np.float32,
)  # in which a checkpoint may keep d, or a product that makes it
ROUNDING = 2.0**-22  # of a block's largest: what computing w = d * q + m in fp32 may have lost
NUM_SAMPLED_ROWS = 8  # that show whether it is worth looking at all of them
MIN_SHARE = 0.5  # of the linear weights that must lie on grids for the graph to be worth it
FP32_ARITHMETIC, INT8_ARITHMETIC = 1, 4  # MatMulNBits' accuracy levels
NUM_DIGITS = 3  # of 8 bits: more than the 24 bits of fp32 hold
SMALLEST = np.float32(1e-30)  # in place of a block's largest value where that is 0
MAX_ERROR = 1e-4  # of logits against the fp32 graph, as a share of the largest
MAX_TIME = 0.95  # of a step of the fp32 graph
NUM_TIMED_STEPS = 12


class Grid(NamedTuple):
    """W [N, K] as d * q + m: q [N, K] uint8, d and m [N, K / 32] fp32.

    `bits` 4: q up to 15. `bits` 8: q up to 255, and m is -128 d.
    """

    bits: int
    q: NDArray[np.uint8]
    d: Weights
    m: Weights


def find_grid(weight: Weights) -> Grid | None:
    """The grid on which all of `weight` [N, K] lies but for rounding, if there is one."""
    if weight.shape[1] % BLOCK == 0:
        for search in (_find_narrow, _find_wide):
            if search(weight[:NUM_SAMPLED_ROWS]) is not None and (grid := search(weight)):
                return grid
    return None


def _find_narrow(weight: Weights) -> Grid | None:
    """A grid of 4 bits. The largest of a block is from 15 down to 1 steps above the smallest, m."""
    blocks = weight.reshape(-1, BLOCK)
    low, high = blocks.min(axis=1), blocks.max(axis=1)
    q, d = np.zeros(blocks.shape, np.uint8), np.zeros_like(low)
    left = np.arange(len(blocks))
    for steps, stored in itertools.product(range(15, 0, -1), STEP_TYPES):
        m = low[left, None]
        step = ((high[left, None] - m) / np.float32(steps)).astype(stored).astype(np.float32)
        level, fits = _levels(blocks[left], step, m)
        fits &= (level <= 15).all(axis=1)
        found = left[fits]
        q[found], d[found] = level[fits], step[fits, 0]
        left = left[~fits]
        if not len(left):
            shape = len(weight), -1
            return Grid(4, q.reshape(weight.shape), d.reshape(shape), low.reshape(shape))
    return None


def _find_wide(weight: Weights) -> Grid | None:
    """A grid of 8 bits about zero, from which the largest is 127 steps away."""
    blocks = weight.reshape(-1, BLOCK)
    for stored in STEP_TYPES:
        step = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        step = step.astype(stored).astype(np.float32)
        level, fits = _levels(blocks, step, np.float32(0))
        if fits.all() and np.abs(level).max() <= 127:
            d = step.reshape(len(weight), -1)
            return Grid(8, (level + 128).astype(np.uint8).reshape(weight.shape), d, -128 * d)
    return None


def _levels(
    blocks: Weights, step: Weights, low: Weights | np.float32
) -> tuple[Weights, NDArray[np.bool_]]:
    """The level of each of `blocks` [n, 32], and which blocks lie on theirs."""
    level = np.rint((blocks - low) / np.where(step > 0, step, 1))
    off = np.abs(level * step + low - blocks)
    return level, (off <= ROUNDING * np.abs(blocks).max(axis=1, keepdims=True)).all(axis=1)


def build_single_token(verifier: Path, dims: VerifierDims) -> list[Path]:
    """Write the graph for single tokens beside the fp32 graph `verifier`, if it helps here.

    Returns its files: none when less than half of the weights lie on grids or this machine's
    kernels are not exact or not faster, a second one when not all weights fit in the first.
    """
    target = verifier.with_stem(verifier.stem + SINGLE_TOKEN)
    with step("looking for a lossless form of the verifier's weights in few bits"):
        files = rewrite(verifier, target)
    if not files:
        return []
    with step("comparing steps of a single token in ONNX Runtime"):
        (logits, seconds), (own_logits, own_seconds) = (
            _measure(verifier, single, dims) for single in (None, target)
        )
    error = float(np.abs(own_logits - logits).max() / np.abs(logits).max())
    figures = f"{1e3 * own_seconds:.1f} ms instead of {1e3 * seconds:.1f}, logits {error:.1g} off"
    if error <= MAX_ERROR and own_seconds <= MAX_TIME * seconds:
        say(f"steps of a single token read few bits: {figures} (of the largest)")
        return files
    say(f"steps of a single token stay as they are; with few bits: {figures} (of the largest)")
    for file in files:
        file.unlink()
    return []


def rewrite(source: Path, target: Path) -> list[Path]:
    """Write to `target` the fp32 graph `source` with linear weights in few bits where they can be.

    Returns the files written; see `build_single_token`.
    """
    graph = LinearGraph(source)
    left = (1 - MIN_SHARE) * sum(graph.size(node) for node in graph.layers)
    rewriter = _Rewriter(graph)
    for node in graph.layers:
        if grid := find_grid(graph.weight(node)):
            graph.replace(node, rewriter.linear(node, grid))
            continue
        left -= graph.size(node)
        if left <= 0:
            return []
    return graph.write(target)


def _measure(
    verifier: Path, single: Path | None, dims: VerifierDims
) -> tuple[NDArray[np.float32], float]:
    """Logits of one token after a block of others, and the median seconds of such a step."""
    tokens = np.random.default_rng(0).integers(0, dims.vocab_size, dims.kv.block_tokens + 1)
    *context, last = tokens.tolist()
    length, blocks = len(context), [0]
    engine = OrtEngine(
        verifier, dims.kv, verifier_inputs(dims), verifier_outputs(dims), len(blocks), 0, single
    )
    engine.run(pack_verify([VerifySegment(context, 0, blocks, 1)], length).inputs)
    engine.commit(np.arange(length), np.arange(length))
    one_token = pack_verify([VerifySegment([last], length, blocks, 1)], length).inputs
    seconds = []
    for _ in range(NUM_TIMED_STEPS):
        start = time.perf_counter()
        logits = engine.run(one_token)["logits"].copy()
        seconds.append(time.perf_counter() - start)
    engine.close()
    return logits, statistics.median(seconds)


class _Rewriter:
    """Makes the nodes that take a linear layer's place."""

    def __init__(self, graph: LinearGraph) -> None:
        self._store = graph.store
        self._summed: set[str] = set()  # inputs of several linear layers

    def linear(self, node: onnx.NodeProto, grid: Grid) -> list[onnx.NodeProto]:
        """What computes x W^T + bias [1, N] from x [1, K]; `node` is a Gemm with transB."""
        x, output, bias = node.input[0], node.output[0], list(node.input[2:])
        product = f"{output}.product" if bias else output
        make = self._narrow if grid.bits == 4 else self._wide
        nodes = make(x, grid, product)
        if bias:
            nodes.append(helper.make_node("Add", [product, *bias], [output]))
        return nodes

    def _narrow(self, x: str, grid: Grid, output: str) -> list[onnx.NodeProto]:
        packed = grid.q[:, 0::2] | (grid.q[:, 1::2] << 4)
        offsets = self._store(f"{output}.m", (grid.m + 8 * grid.d).T)
        sums, nodes = f"{x}.sums", []
        if x not in self._summed:
            self._summed.add(x)
            axis = self._store("last_axis", np.array([2]))
            nodes = [
                self._blocks(x, grid, f"{sums}.blocks"),
                helper.make_node("ReduceSum", [f"{sums}.blocks", axis], [sums], keepdims=0),
            ]
        return [
            *nodes,
            self._product(x, grid, packed, f"{output}.centred", FP32_ARITHMETIC),
            helper.make_node("Gemm", [sums, offsets, f"{output}.centred"], [output]),
        ]

    def _wide(self, x: str, grid: Grid, output: str) -> list[onnx.NodeProto]:
        axis = self._store("last_axis", np.array([2]))
        share = self._store("digit_share", np.float32(1 / 127))
        smallest = self._store("smallest", SMALLEST)
        rest, digits = f"{output}.blocks", []
        nodes = [self._blocks(x, grid, rest)]
        for i in range(NUM_DIGITS - 1):
            at = f"{output}.digit{i}"
            nodes += [
                helper.make_node("Abs", [rest], [f"{at}.sizes"]),
                helper.make_node("ReduceMax", [f"{at}.sizes", axis], [f"{at}.largest"]),
                helper.make_node("Mul", [f"{at}.largest", share], [f"{at}.step0"]),
                helper.make_node("Max", [f"{at}.step0", smallest], [f"{at}.step"]),
                helper.make_node("Div", [rest, f"{at}.step"], [f"{at}.ratio"]),
                helper.make_node("Round", [f"{at}.ratio"], [f"{at}.level"]),
                helper.make_node("Mul", [f"{at}.level", f"{at}.step"], [at]),
                helper.make_node("Sub", [rest, at], [f"{at}.rest"]),
            ]
            digits.append(at)
            rest = f"{at}.rest"
        flat = self._store(f"{output}.flat", np.array([-1, grid.q.shape[1]]))
        first = self._store("first_axis", np.array([0]))
        return [
            *nodes,
            helper.make_node("Concat", [*digits, rest], [f"{output}.digits"], axis=0),
            helper.make_node("Reshape", [f"{output}.digits", flat], [f"{output}.rows"]),
            self._product(f"{output}.rows", grid, grid.q, f"{output}.parts", INT8_ARITHMETIC),
            helper.make_node("ReduceSum", [f"{output}.parts", first], [output], keepdims=1),
        ]

    def _blocks(self, x: str, grid: Grid, blocks: str) -> onnx.NodeProto:
        num_blocks = grid.d.shape[1]
        shape = self._store(f"blocks_shape.{num_blocks}", np.array([-1, num_blocks, BLOCK]))
        return helper.make_node("Reshape", [x, shape], [blocks])

    def _product(
        self, x: str, grid: Grid, packed: NDArray, output: str, arithmetic: int
    ) -> onnx.NodeProto:
        """Of x [rows, K] with d * (q - 8), or with d * (q - 128) for 8 bits."""
        rows, columns = grid.q.shape
        q = self._store(f"{output}.q", packed.reshape(*grid.d.shape, -1))
        return helper.make_node(
            "MatMulNBits",
            [x, q, self._store(f"{output}.d", grid.d)],
            [output],
            domain="com.microsoft",
            K=columns,
            N=rows,
            bits=grid.bits,
            block_size=BLOCK,
            accuracy_level=arithmetic,
        )
