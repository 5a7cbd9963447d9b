"""Binding against a small graph whose outputs show what the engine handed it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from runtime.engine import EngineError
from runtime.ort_engine import OrtEngine
from runtime.spec import Dtype, KvDims, TensorSpec

NUM_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM = 4, 2, 2, 3
ROW = HEADS * HEAD_DIM
KV = KvDims(1, HEADS, HEAD_DIM, BLOCK_TOKENS, "fp32")
INPUTS = [
    TensorSpec("token_ids", "int64", ("N",)),
    TensorSpec("weights", "fp32", ("N", ROW)),
    TensorSpec("table", "int64", ("R", "M")),
    *KV.pool_specs(),
]
OUTPUTS = [
    TensorSpec("doubled", "int64", ("N",)),
    TensorSpec("blocks", "fp32", ("R", "M", BLOCK_TOKENS, HEADS, HEAD_DIM)),
    *KV.new_specs("N"),
]


def make_graph(path: Path, wide: int = ROW) -> Path:
    """doubled = 2 * token_ids, blocks = k_pool[table], k_new = weights, v_new = -weights."""
    kv_shape = [TensorProto.FLOAT, ["N", HEADS, HEAD_DIM]]
    pool_shape = [TensorProto.FLOAT, ["P", BLOCK_TOKENS, HEADS, HEAD_DIM]]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["token_ids", "token_ids"], ["doubled"]),
            helper.make_node("Gather", ["k_pool.0", "table"], ["keys"]),
            helper.make_node("Gather", ["v_pool.0", "table"], ["values"]),
            helper.make_node("Sub", ["keys", "values"], ["blocks"]),
            helper.make_node("Reshape", ["weights", "shape"], ["k_new.0"]),
            helper.make_node("Neg", ["k_new.0"], ["v_new.0"]),
        ],
        "tiny",
        [
            info("token_ids", TensorProto.INT64, ["N"]),
            info("weights", TensorProto.FLOAT, ["N", wide]),
            info("table", TensorProto.INT64, ["R", "M"]),
            info("k_pool.0", *pool_shape),
            info("v_pool.0", *pool_shape),
        ],
        [
            info("doubled", TensorProto.INT64, ["N"]),
            info("blocks", TensorProto.FLOAT, ["R", "M", BLOCK_TOKENS, HEADS, HEAD_DIM]),
            info("k_new.0", *kv_shape),
            info("v_new.0", *kv_shape),
        ],
        [helper.make_tensor("shape", TensorProto.INT64, [3], [-1, HEADS, HEAD_DIM])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def open_engine(path: Path, **options: Any) -> OrtEngine:
    arguments = {"kv": KV, "inputs": INPUTS, "outputs": OUTPUTS, **options}
    return OrtEngine(path, num_blocks=NUM_BLOCKS, threads=1, **arguments)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[OrtEngine]:
    engine = open_engine(make_graph(tmp_path / "tiny.onnx"))
    yield engine
    engine.close()


def feed(tokens: int, table: list[list[int]], seed: int = 0) -> dict[str, NDArray]:
    random = np.random.default_rng(seed)
    return {
        "token_ids": np.arange(tokens),
        "weights": random.normal(size=(tokens, ROW)).astype(np.float32),
        "table": np.array(table),
    }


def pool_rows(engine: OrtEngine) -> NDArray[np.float32]:
    """Keys minus values of all slots, as the graph reads them from the pool."""
    result = engine.run(feed(1, [list(range(NUM_BLOCKS))]))["blocks"]
    return result.reshape(NUM_BLOCKS * BLOCK_TOKENS, ROW).copy()


def test_shapes_may_change_from_run_to_run(engine: OrtEngine) -> None:
    """Growing, shrinking and growing again: a buffer bound to an old shape would show."""
    for tokens, table in ((3, [[0]]), (7, [[0, 1], [2, 3]]), (1, [[3]]), (7, [[1], [2]])):
        inputs = feed(tokens, table)
        outputs = engine.run(inputs)
        assert outputs.keys() == {"doubled", "blocks"}  # new K/V stay on the device
        np.testing.assert_array_equal(outputs["doubled"], 2 * inputs["token_ids"])
        shape = (*np.shape(table), BLOCK_TOKENS, HEADS, HEAD_DIM)
        np.testing.assert_array_equal(outputs["blocks"], np.zeros(shape))


def test_a_block_goes_to_host_memory_and_back(engine: OrtEngine) -> None:
    """Into another block of the pool, all layers, where the graph reads it."""
    engine.run(feed(3, [[0]], seed=1))
    engine.commit(np.arange(3), np.array([2, 3, 5]))
    before = pool_rows(engine)
    data = engine.read_block(1)
    assert (data.dtype, data.shape) == (np.uint8, (KV.token_bytes * BLOCK_TOKENS,))
    engine.write_block(3, data)
    expected = before.copy()
    expected[6:8] = before[2:4]
    assert expected[6:8].any()
    np.testing.assert_array_equal(pool_rows(engine), expected)
    engine.close()
    for use in (lambda: engine.read_block(1), lambda: engine.write_block(3, data)):
        with pytest.raises(EngineError, match="tiny is closed"):
            use()


def test_inputs_need_not_be_contiguous(engine: OrtEngine) -> None:
    inputs = feed(4, [[0]])
    inputs["token_ids"] = np.arange(8)[::2]
    np.testing.assert_array_equal(engine.run(inputs)["doubled"], [0, 4, 8, 12])


def test_commit_writes_the_chosen_rows_into_the_chosen_slots_only(engine: OrtEngine) -> None:
    """A rejected token must leave no trace in the pool."""
    inputs = feed(5, [[0]])
    engine.run(inputs)
    engine.commit(np.array([0, 1, 4]), np.array([6, 2, 3]))
    expected = np.zeros((NUM_BLOCKS * BLOCK_TOKENS, ROW), np.float32)
    expected[[6, 2, 3]] = 2 * inputs["weights"][[0, 1, 4]]
    np.testing.assert_array_equal(pool_rows(engine), expected)
    # A later run with as many tokens reuses the buffer; what was committed stays.
    again = feed(5, [[0]], seed=1)
    engine.run(again)
    engine.commit(np.array([3]), np.array([2]))
    expected[2] = 2 * again["weights"][3]
    np.testing.assert_array_equal(pool_rows(engine), expected)


def test_outputs_are_valid_until_the_next_run(engine: OrtEngine) -> None:
    first = engine.run(feed(3, [[0]]))["doubled"]
    engine.commit(np.array([0]), np.array([0]))
    np.testing.assert_array_equal(first, [0, 2, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.arange(3, dtype=np.int32)}, "token_ids must be int64 .*got int32 "),
        ({"token_ids": np.zeros((3, 1), np.int64)}, r"token_ids must be int64 .*got int64 \[3, 1"),
        ({"weights": np.zeros((3, 5), np.float32)}, r"weights must be fp32 .*got float32 \[3, 5"),
        ({"weights": np.zeros((3, ROW))}, "weights must be fp32 .*got float64"),
        ({"weights": np.zeros((2, ROW), np.float32)}, r"weights must be .*'N': 3.*got .*\[2, 6"),
        ({"table": np.array([[NUM_BLOCKS]])}, r"tiny failed on inputs .*'table': \(1, 1\)"),
        ({"extra": np.zeros(1)}, "tiny takes .*got .*extra"),
    ],
)
def test_what_does_not_fit_is_named(
    engine: OrtEngine, change: dict[str, NDArray], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        engine.run({**feed(3, [[0]]), **change})
    # and the engine goes on
    np.testing.assert_array_equal(engine.run(feed(2, [[0]]))["doubled"], [0, 2])


def test_a_missing_input_is_named(engine: OrtEngine) -> None:
    inputs = feed(3, [[0]])
    del inputs["weights"]
    with pytest.raises(EngineError, match=r"takes \['table', 'token_ids', 'weights'\], got"):
        engine.run(inputs)


def test_close_may_be_called_again_and_use_after_it_says_so(engine: OrtEngine) -> None:
    engine.run(feed(1, [[0]]))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="tiny is closed"):
        engine.run(feed(1, [[0]]))
    with pytest.raises(EngineError, match="tiny is closed"):
        engine.commit(np.array([0]), np.array([0]))


def test_a_graph_of_another_version_is_refused_with_the_command(tmp_path: Path) -> None:
    path = make_graph(tmp_path / "tiny.onnx")
    inputs = [TensorSpec("positions", "int64", ("N",)), *INPUTS]
    with pytest.raises(EngineError, match=r"inputs .*differing: positions\): run `make engines`"):
        open_engine(path, inputs=inputs)
    with pytest.raises(EngineError, match=r"outputs .*differing: doubled\): run `make engines`"):
        open_engine(path, outputs=OUTPUTS[1:])


def test_a_graph_of_other_widths_fails_instead_of_writing_beyond_its_buffer(
    tmp_path: Path,
) -> None:
    path = make_graph(tmp_path / "tiny.onnx")
    narrow = [OUTPUTS[0], TensorSpec("blocks", "fp32", ("R", "M")), *OUTPUTS[2:]]
    engine = open_engine(path, outputs=narrow)
    with pytest.raises(EngineError, match="tiny failed on inputs"):
        engine.run(feed(3, [[0]]))


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=r"tiny\.onnx cannot be loaded by ONNX Runtime"):
        open_engine(path)


def test_a_dtype_numpy_lacks_is_refused_with_the_command(tmp_path: Path) -> None:
    dtype: Dtype = "bf16"
    kv = KvDims(1, HEADS, HEAD_DIM, BLOCK_TOKENS, dtype)
    with pytest.raises(EngineError, match=r"keeps its K/V in bf16.*make engines DTYPE=fp32"):
        open_engine(make_graph(tmp_path / "tiny.onnx"), kv=kv)
