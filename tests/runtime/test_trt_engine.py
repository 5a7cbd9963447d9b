"""The TensorRT runner by itself against a strict stand-in of TensorRT; see also test_engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from runtime import trt_engine
from runtime.engine import EngineError
from runtime.manifest import Builder, Manifest, ManifestError
from runtime.spec import (
    KvDims,
    TensorSpec,
)
from runtime.trt_engine import TrtEngine, check_gpu, load_tensorrt
from tests.runtime.fake_tensorrt import FAKE_TENSORRT, CpuDevice, write_plan
from tests.runtime.fakes import manifest

NUM_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM = 4, 2, 2, 3
ROW = HEADS * HEAD_DIM
KV = KvDims(1, HEADS, HEAD_DIM, BLOCK_TOKENS, "fp32")
INPUTS = [
    TensorSpec("token_ids", "int64", ("N",)),
    TensorSpec("weights", "fp32", ("N", ROW)),
    TensorSpec("slots", "int64", ("L",)),
    *KV.pool_specs(),
]
OUTPUTS = [
    TensorSpec("doubled", "int64", ("N",)),
    TensorSpec("rows", "fp32", ("L", ROW)),
    *KV.new_specs("N"),
]
DECODE = {"N": (1, 2, 6), "L": (1, 2, 8), "P": (1, 4, 8)}
PREFILL = {"N": (1, 8, 16), "L": (0, 1, 2), "P": (1, 4, 8)}


def make_graph(path: Path) -> Path:
    """doubled = 2 * token_ids, rows = (k_pool - v_pool)[slots], k_new = weights, v_new = -k_new."""
    info, num = helper.make_tensor_value_info, TensorProto.FLOAT
    pool, new = [num, ["P", BLOCK_TOKENS, HEADS, HEAD_DIM]], [num, ["N", HEADS, HEAD_DIM]]
    constants = {"row": [-1, ROW], "heads": [-1, HEADS, HEAD_DIM]}
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["token_ids", "token_ids"], ["doubled"]),
            helper.make_node("Sub", ["k_pool.0", "v_pool.0"], ["pools"]),
            helper.make_node("Reshape", ["pools", "row"], ["pool_rows"]),
            helper.make_node("Gather", ["pool_rows", "slots"], ["rows"]),
            helper.make_node("Reshape", ["weights", "heads"], ["k_new.0"]),
            helper.make_node("Neg", ["k_new.0"], ["v_new.0"]),
        ],
        "tiny",
        [
            info("token_ids", TensorProto.INT64, ["N"]),
            info("weights", num, ["N", ROW]),
            info("slots", TensorProto.INT64, ["L"]),
            info("k_pool.0", *pool),
            info("v_pool.0", *pool),
        ],
        [
            info("doubled", TensorProto.INT64, ["N"]),
            info("rows", num, ["L", ROW]),
            info("k_new.0", *new),
            info("v_new.0", *new),
        ],
        [helper.make_tensor(n, TensorProto.INT64, [len(v)], v) for n, v in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path
    )
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    graph = make_graph(folder / "tiny.onnx")
    return write_plan(folder / "tiny.plan", graph, INPUTS, OUTPUTS, [DECODE, PREFILL])


def open_engine(plan: Path, **options: Any) -> TrtEngine:
    arguments = {"kv": KV, "inputs": INPUTS, "outputs": OUTPUTS, "num_blocks": NUM_BLOCKS}
    return TrtEngine(plan, **{**arguments, "trt": FAKE_TENSORRT, "device": CpuDevice(), **options})


@pytest.fixture
def engine(plan: Path) -> Iterator[TrtEngine]:
    engine = open_engine(plan)
    yield engine
    engine.close()


def feed(tokens: int, slots: list[int], seed: int = 0) -> dict[str, NDArray]:
    random = np.random.default_rng(seed)
    return {
        "token_ids": np.arange(1, tokens + 1),
        "weights": random.normal(size=(tokens, ROW)).astype(np.float32),
        "slots": np.array(slots, np.int64),
    }


ALL_SLOTS = list(range(NUM_BLOCKS * BLOCK_TOKENS))


def test_sizes_may_change_from_run_to_run(engine: TrtEngine) -> None:
    """Growing, shrinking, through both profiles: stale padding or a stale shape would show."""
    for tokens, slots in ((3, [0]), (6, [1, 2]), (1, [3]), (16, []), (5, ALL_SLOTS), (3, [0])):
        inputs = feed(tokens, slots)
        outputs = engine.run(inputs)
        assert outputs.keys() == {"doubled", "rows"}  # new K/V stay on the device
        np.testing.assert_array_equal(outputs["doubled"], 2 * inputs["token_ids"])
        np.testing.assert_array_equal(outputs["rows"], np.zeros((len(slots), ROW)))


def test_a_tier_is_captured_the_second_time_and_replayed_with_new_data(plan: Path) -> None:
    device = CpuDevice()
    engine = open_engine(plan, device=device)
    counts = []
    for seed, tokens in enumerate((3, 4, 3, 4, 2, 2)):  # 3 and 4 share a tier
        inputs = feed(tokens, [0], seed)
        np.testing.assert_array_equal(engine.run(inputs)["doubled"], 2 * inputs["token_ids"])
        counts.append((device.captures, device.replays))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 3), (2, 4)]


def test_prefill_is_never_captured(plan: Path) -> None:
    device = CpuDevice()
    engine = open_engine(plan, device=device)
    for _ in range(3):
        engine.run(feed(12, []))
    assert device.captures == 0


def test_the_least_recent_tier_goes(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_engine, "MAX_TIERS", 2)
    device = CpuDevice()
    engine = open_engine(plan, device=device)
    for tokens in (1, 1, 2, 4, 1, 1):  # the last tier of 1 is a new one
        engine.run(feed(tokens, [0]))
    assert device.captures == 2
    assert len(engine._tiers) == 2


def test_commit_writes_the_chosen_rows_into_the_chosen_slots_only(engine: TrtEngine) -> None:
    inputs = feed(5, [0])
    engine.run(inputs)
    engine.commit(np.array([0, 1, 4]), np.array([6, 2, 3]))
    expected = np.zeros((len(ALL_SLOTS), ROW), np.float32)
    expected[[6, 2, 3]] = 2 * inputs["weights"][[0, 1, 4]]
    np.testing.assert_array_equal(engine.run(feed(1, ALL_SLOTS))["rows"], expected)


def test_a_block_can_be_read_and_written_elsewhere(engine: TrtEngine) -> None:
    inputs = feed(2, [0])
    engine.run(inputs)
    engine.commit(np.array([0, 1]), np.array([2, 3]))  # block 1
    data = engine.read_block(1)
    assert (data.dtype, data.shape) == (np.uint8, (2 * BLOCK_TOKENS * ROW * 4,))
    engine.write_block(3, data)
    rows = engine.run(feed(1, ALL_SLOTS))["rows"]
    np.testing.assert_array_equal(rows[6:8], 2 * inputs["weights"])
    np.testing.assert_array_equal(rows[2:4], rows[6:8])
    assert not rows[[0, 1, 4, 5]].any()
    engine.close()
    for use in (lambda: engine.read_block(1), lambda: engine.write_block(3, data)):
        with pytest.raises(EngineError, match="tiny is closed"):
            use()


def test_edges_of_the_profiles(engine: TrtEngine) -> None:
    for tokens, slots in ((1, [0]), (6, ALL_SLOTS), (16, [0, 1]), (16, [])):
        assert engine.run(feed(tokens, slots))["doubled"].shape == (tokens,)
    for tokens, slots, message in (
        (17, [0], r"tiny: N is 17 \(profiles: 1 to 6 or 1 to 16\): build with a SERVING"),
        (2, [*ALL_SLOTS, 0], r"L is 9 \(profiles: 1 to 8 or 0 to 2\)"),
        (7, [0, 1, 2], r"no profile takes .*'N': 7, 'L': 3.* together"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.run(feed(tokens, slots))


def test_wrong_inputs_are_named(engine: TrtEngine) -> None:
    with pytest.raises(EngineError, match=r"token_ids must be int64 .*got int32"):
        engine.run({**feed(3, [0]), "token_ids": np.arange(3, dtype=np.int32)})
    with pytest.raises(EngineError, match=r"tiny takes .*got .*extra"):
        engine.run({**feed(3, [0]), "extra": np.zeros(1)})


def test_failing_is_told_in_tensorrts_words_and_the_engine_goes_on(engine: TrtEngine) -> None:
    engine._engine._fail_next = True
    with pytest.raises(EngineError, match=r"tiny failed with .*'N': 4.*: out of luck"):
        engine.run(feed(3, [0]))
    np.testing.assert_array_equal(engine.run(feed(2, [0]))["doubled"], [2, 4])


def test_close_may_be_called_again_and_use_after_it_says_so(engine: TrtEngine) -> None:
    engine.run(feed(1, [0]))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="tiny is closed"):
        engine.run(feed(1, [0]))
    with pytest.raises(EngineError, match="tiny is closed"):
        engine.commit(np.array([0]), np.array([0]))


def test_another_contract_is_refused(plan: Path) -> None:
    with pytest.raises(EngineError, match=r"differing: position_ids\).*make engines TARGET"):
        open_engine(plan, inputs=[TensorSpec("position_ids", "int64", ("N",)), *INPUTS])
    wider = [TensorSpec("token_ids", "fp32", ("N",)), *INPUTS[1:]]
    with pytest.raises(EngineError, match=r"token_ids must be .*FLOAT.*the plan has .*INT64"):
        open_engine(plan, inputs=wider)


def test_a_pool_beyond_the_profile_is_refused(plan: Path) -> None:
    with pytest.raises(EngineError, match=r"at most 8 blocks, .* ask for 9: lower them"):
        open_engine(plan, num_blocks=9)


def test_a_damaged_plan_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.plan"
    path.write_bytes(b"not a plan")
    with pytest.raises(EngineError, match=r"tiny\.plan cannot be loaded by tensorrt 10\.13\.3\.9"):
        open_engine(path)


# Refusals of foreign plans


def built_by(name: str, version: str, **device: Any) -> Manifest:
    return replace(manifest(), builder=Builder(name, version), device=device)


def test_another_version_is_refused_with_the_command() -> None:
    foreign = built_by("tensorrt_rtx", "1.2.3")
    with pytest.raises(ManifestError, match=r"tensorrt_rtx 1\.2\.3, this machine has .*TARGET="):
        load_tensorrt(foreign)


def test_a_missing_tensorrt_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ManifestError, match=r"tensorrt 10\.13, which cannot be .*TARGET=tensorrt"):
        load_tensorrt(built_by("tensorrt", "10.13"))


@pytest.mark.parametrize(
    ("device", "own", "fits"),
    [
        ({"compute_capabilities": ["SM86"]}, (8, 6), True),
        ({"compute_capabilities": ["SM86", "SM120"]}, (12, 0), True),
        ({"compute_capabilities": []}, (8, 9), True),
        ({"compute_capabilities": ["SM86"]}, (8, 9), False),
        (
            {"compute_capabilities": ["SM86"], "hardware_compatibility": "ampere_plus"},
            (9, 0),
            True,
        ),
        (
            {"compute_capabilities": ["SM86"], "hardware_compatibility": "ampere_plus"},
            (7, 5),
            False,
        ),
    ],
)
def test_another_class_of_gpu_is_refused(
    device: dict[str, Any], own: tuple[int, int], fits: bool
) -> None:
    foreign = built_by("tensorrt", "10.13", **device)
    if fits:
        check_gpu(foreign, *own)
    else:
        with pytest.raises(ManifestError, match=r"built for SM86, this GPU is SM.*TARGET=tensorrt"):
            check_gpu(foreign, *own)
