"""TensorRT's runtime on a CPU: a plan is a description of profiles beside an ONNX file.

As strict as the real one is silent: unknown names, wrong modes, shapes outside the profile,
unset or unaligned addresses, running without scratch memory and use after a change of profile are
assertion failures. Execution reads and writes the very addresses it was given.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from engines.profiles import profiles, serving_limits
from runtime.config import RuntimeConfig
from runtime.manifest import FILE_NAME, Artifact, Builder, load_manifest
from runtime.spec import (
    TensorSpec,
    drafter_inputs,
    drafter_outputs,
    verifier_inputs,
    verifier_outputs,
)

STREAM = 77
ALIGNMENT = 4  # of a tensor's elements at least
NUMPY = {"INT64": np.int64, "FLOAT": np.float32, "HALF": np.float16}
DTYPES = {"int64": "INT64", "fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}


def write_plan(
    path: Path,
    graph: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    profiles: Sequence[Mapping[str, Sequence[int]]],
) -> Path:
    """Write a plan of `graph` whose dimensions may be as each profile's symbols say."""

    def shapes(spec: TensorSpec) -> list[list[list[int]]]:
        return [
            [[d if isinstance(d, int) else p[d][i] for d in spec.dims] for i in range(3)]
            for p in profiles
        ]

    tensors = {
        spec.name: {
            "mode": mode,
            "dtype": DTYPES[spec.dtype],
            "shape": [d if isinstance(d, int) else -1 for d in spec.dims],
            "profiles": shapes(spec) if mode == "INPUT" else [],
            "dims": list(spec.dims),
        }
        for mode, specs in (("INPUT", inputs), ("OUTPUT", outputs))
        for spec in specs
    }
    path.write_text(
        json.dumps({"graph": str(graph), "tensors": tensors, "num_profiles": len(profiles)})
    )
    return path


def build_plans(folder: Path, config: RuntimeConfig) -> None:
    """As `build_engines`: `folder`/engines from `folder`/onnx, for the stand-in."""
    exported = load_manifest(folder / "onnx")
    limits = serving_limits(exported, config)
    draft = exported.drafter
    assert draft is not None
    sides = {
        "verifier": (verifier_inputs(exported.verifier), verifier_outputs(exported.verifier)),
        "drafter": (drafter_inputs(draft), drafter_outputs(draft)),
    }
    engines = folder / "engines"
    engines.mkdir()
    artifacts = {}
    for name, artifact in exported.artifacts.items():
        source, path = folder / "onnx" / artifact.path, engines / artifact.path
        if name in sides:
            by_phase = list(profiles(exported, limits)[name].values())
            path = write_plan(engines / f"{name}.plan", source, *sides[name], by_phase)
        else:
            path.write_bytes(source.read_bytes())
        artifacts[name] = Artifact.of(path)
    built = replace(
        exported,
        builder=Builder("tensorrt", FAKE_TENSORRT.__version__),
        artifacts=artifacts,
        serving_limits=limits,
    )
    (engines / FILE_NAME).write_text(built.to_json())


def install(patch: pytest.MonkeyPatch) -> None:
    """Let plans be run by the stand-in, on a GPU with much free memory."""
    patch.setattr("runtime.trt_engine.load_tensorrt", lambda manifest: FAKE_TENSORRT)
    patch.setattr("runtime.trt_engine.CudaDevice", CpuDevice)
    patch.setattr("torch.cuda.mem_get_info", lambda: (1 << 40, 1 << 40))


class CpuDevice:
    """`CudaDevice` without a GPU: everything happens at once, and a graph is its function."""

    name = "cpu"
    stream_handle = STREAM

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def on_stream(self) -> Any:
        return nullcontext()

    def pinned(self, tensor: Any) -> Any:
        return tensor

    def synchronize(self) -> None:
        pass

    def capture(self, enqueue: Callable[[], None]) -> Any:
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            enqueue()

        return SimpleNamespace(replay=replay)


class FakeILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None:
        pass

    def log(self, severity: int, msg: str) -> None:
        raise NotImplementedError


class FakeContext:
    """See IExecutionContext."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._scratch = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory
        assert size >= self._engine.device_memory_size_v2
        self._scratch = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return False
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        about = self._engine._tensors[name]
        assert about["mode"] == "INPUT", f"{name} is an output"
        assert self._profile is not None, "no profile is chosen"
        low, _, high = about["profiles"][self._profile]
        assert len(shape) == len(low)
        fits = all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        if not fits:
            self._engine._log.log(FakeILogger.ERROR, f"{name} {list(shape)} is out of range")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert name in self._engine._tensors
        assert memory % ALIGNMENT == 0
        assert memory
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        inputs = (n for n, t in self._engine._tensors.items() if t["mode"] == "INPUT")
        return [name for name in inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        sizes: dict[str, int] = {}
        for known, shape in self._shapes.items():
            for dim, size in zip(self._engine._tensors[known]["dims"], shape, strict=True):
                if isinstance(dim, str):
                    assert sizes.setdefault(dim, size) == size, f"two sizes of {dim}"
        dims = self._engine._tensors[name]["dims"]
        return tuple(d if isinstance(d, int) else sizes[d] for d in dims)

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        assert self._scratch, "no device memory"
        assert not self.infer_shapes()
        tensors = self._engine._tensors
        assert self._addresses.keys() == tensors.keys()
        if self._engine._fail_next:
            self._engine._fail_next = False
            self._engine._log.log(FakeILogger.ERROR, "out of luck")
            return False
        feeds = {
            name: self._array(name).copy() for name, t in tensors.items() if t["mode"] == "INPUT"
        }
        names = [name for name, t in tensors.items() if t["mode"] == "OUTPUT"]
        for name, value in zip(names, self._engine._session.run(names, feeds), strict=True):
            into = self._array(name)
            assert value.shape == into.shape, f"{name}: {value.shape} {into.shape}"
            into[...] = value
        return True

    def _array(self, name: str) -> NDArray[Any]:
        dtype = np.dtype(NUMPY[self._engine._tensors[name]["dtype"]])
        shape = self.get_tensor_shape(name)
        size = math.prod(shape) * dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self._addresses[name])
        return np.frombuffer(memory, dtype).reshape(shape)


class FakeEngine:
    """See ICudaEngine."""

    device_memory_size_v2 = 1024

    def __init__(self, plan: dict[str, Any], log: Any) -> None:
        self._tensors: dict[str, Any] = plan["tensors"]
        self.num_optimization_profiles: int = plan["num_profiles"]
        self._log = log
        self._fail_next = False
        self._session = ort.InferenceSession(plan["graph"], providers=["CPUExecutionProvider"])

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> str:
        mode: str = self._tensors[name]["mode"]
        return mode

    def get_tensor_dtype(self, name: str) -> str:
        dtype: str = self._tensors[name]["dtype"]
        return dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name]["shape"])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self._tensors[name]["profiles"][profile_index]]

    def create_execution_context(self, strategy: str) -> FakeContext:
        assert strategy == "USER_MANAGED"
        return FakeContext(self)


class FakeRuntime:
    """See Runtime."""

    def __init__(self, logger: Any) -> None:
        assert isinstance(logger, FakeILogger)
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> FakeEngine | None:
        try:
            plan = json.loads(serialized_engine)
        except ValueError:
            self._logger.log(FakeILogger.ERROR, "magic tag does not match")
            return None
        onnx.checker.check_model(plan["graph"])
        return FakeEngine(plan, self._logger)


def names(*members: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: name for name in members})


FAKE_TENSORRT: Any = ModuleType("tensorrt")
FAKE_TENSORRT.__version__ = "10.13.3.9"
FAKE_TENSORRT.DataType = names("INT64", "FLOAT", "HALF", "BF16")
FAKE_TENSORRT.ExecutionContextAllocationStrategy = names("STATIC", "USER_MANAGED")
FAKE_TENSORRT.ILogger = FakeILogger
FAKE_TENSORRT.Runtime = FakeRuntime
FAKE_TENSORRT.TensorIOMode = names("INPUT", "OUTPUT")
