"""ONNX Runtime engine: a session bound once to its KV pool, on a CPU or a CUDA device.

Pools are bound to the session when it is made and never copied. New K/V land in a buffer of ours,
from which `commit` writes the accepted rows into the pool.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.engine import EngineError, check_inputs
from runtime.spec import KvDims, TensorSpec

_NUMPY = {"int64": np.int64, "fp32": np.float32, "fp16": np.float16}


class _Bound:
    """A session, bound to the pools once and to what else a run takes before each."""

    def __init__(self, path: Path, device: str, threads: int) -> None:
        self.session = _session(path, device, threads)
        self.binding = self.session.io_binding()
        self.new: Any = None  # K/V of the last run, [2 * num_layers, N, Hk, D]


class OrtEngine:
    """See `runtime.engine.Engine`.

    `single_token` is a second graph that computes the same, for runs of one token (N = L = 1).
    """

    def __init__(
        self,
        path: Path,
        kv: KvDims,
        inputs: list[TensorSpec],
        outputs: list[TensorSpec],
        num_blocks: int,
        threads: int,
        single_token: Path | None = None,
    ) -> None:
        if kv.dtype not in _NUMPY:
            raise EngineError(
                f"{path.name} keeps its K/V in {kv.dtype}, which ONNX Runtime engines cannot: "
                "run `make engines DTYPE=fp32` (or fp16)"
            )
        self._name = path.stem
        num_kv = 2 * kv.num_layers
        self._inputs = {s.name: s for s in inputs[: len(inputs) - num_kv]}
        self._outputs = outputs[: len(outputs) - num_kv]
        self._pool_specs, self._new_specs = inputs[-num_kv:], outputs[-num_kv:]
        self._kv_dtype = _NUMPY[kv.dtype]
        self._row_shape = (kv.num_kv_heads, kv.head_dim)
        self._device = "cuda" if "CUDAExecutionProvider" in _usable_providers() else "cpu"
        self._general: _Bound | None = _Bound(path, self._device, threads)
        self._single = single_token and _Bound(single_token, self._device, threads)
        sessions = [self._general, self._single] if self._single else [self._general]
        pool_shape = (num_kv, num_blocks, kv.block_tokens, *self._row_shape)
        self._pool = self._pool_memory(pool_shape)
        self._pool_rows = self._pool.reshape(num_kv, num_blocks * kv.block_tokens, *self._row_shape)
        self._new: Any = None  # of the last run
        self._buffers: dict[str, NDArray[Any]] = {}
        for bound in sessions:
            self._check_graph(bound.session, inputs, outputs)
            for spec, layer in zip(self._pool_specs, self._pool, strict=True):
                bound.binding.bind_input(
                    spec.name, self._device, 0, self._kv_dtype, layer.shape, _pointer(layer)
                )

    def run(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; see `Engine.run`. Raises EngineError naming what does not fit."""
        if self._general is None:
            raise EngineError(f"{self._name} is closed")
        inputs = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        sizes = check_inputs(self._name, self._inputs, inputs)
        tokens = sizes[str(self._new_specs[0].dims[0])]
        bound = self._general
        if self._single and tokens == sizes.get("L", 1) == 1:
            bound = self._single
        for name, array in inputs.items():
            bound.binding.bind_cpu_input(name, array)
        results = {}
        for spec in self._outputs:
            shape = tuple(d if isinstance(d, int) else sizes[d] for d in spec.dims)
            results[spec.name] = buffer = self._buffer(spec, shape)
            bound.binding.bind_output(
                spec.name, "cpu", 0, buffer.dtype.type, shape, buffer.ctypes.data
            )
        if bound.new is None or bound.new.shape[1] != tokens:  # else its last bindings still hold
            bound.new = self._zeros((len(self._new_specs), tokens, *self._row_shape))
            for spec, layer in zip(self._new_specs, bound.new, strict=True):
                bound.binding.bind_output(
                    spec.name, self._device, 0, self._kv_dtype, layer.shape, _pointer(layer)
                )
        self._new = bound.new
        try:
            bound.session.run_with_iobinding(bound.binding)
        except Exception as error:  # ONNX Runtime raises several types of its own
            shapes = {name: array.shape for name, array in inputs.items()}
            raise EngineError(f"{self._name} failed on inputs {shapes}: {error}") from error
        return results

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write new K/V into the pool; see `Engine.commit`."""
        if self._general is None:
            raise EngineError(f"{self._name} is closed")
        if self._device == "cpu":
            self._pool_rows[:, slots] = self._new[:, rows]
        else:
            import torch

            to = self._pool_rows.device
            self._pool_rows[:, torch.as_tensor(slots, device=to)] = self._new[
                :, torch.as_tensor(rows, device=to)
            ]

    def read_block(self, block: int) -> NDArray[np.uint8]:
        """Copy a block to host memory; see `Engine.read_block`."""
        if self._general is None:
            raise EngineError(f"{self._name} is closed")
        layers = self._pool[:, block]
        if self._device != "cpu":
            layers = layers.cpu().numpy()
        return np.frombuffer(layers.tobytes(), np.uint8)

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Fill a block; see `Engine.write_block`."""
        if self._general is None:
            raise EngineError(f"{self._name} is closed")
        layers = data.view(self._kv_dtype).reshape(self._pool[:, block].shape)
        if self._device == "cpu":
            self._pool[:, block] = layers
        else:
            import torch

            self._pool[:, block] = torch.from_numpy(layers.copy()).to(self._pool.device)

    def close(self) -> None:
        """Free sessions and pool."""
        self._general = self._single = self._pool = self._pool_rows = self._new = None

    def _buffer(self, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[Any]:
        # Grown, never shrunk: a view of the right size is what the graph writes into.
        size = math.prod(shape)
        flat = self._buffers.get(spec.name)
        if flat is None or flat.size < size:
            flat = self._buffers[spec.name] = np.empty(max(size, 1), _NUMPY[spec.dtype])
        return flat[:size].reshape(shape)

    def _pool_memory(self, shape: tuple[int, ...]) -> Any:
        if self._device != "cpu":
            return self._zeros(shape)
        # Not from malloc: with the huge pages that `dspark` asks of it, the first touch of every
        # 2 MB takes 20 ms where memory is fragmented, in the middle of a step.
        size = math.prod(shape) * np.dtype(self._kv_dtype).itemsize
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(memory, self._kv_dtype).reshape(shape)

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        if self._device == "cpu":
            return np.zeros(shape, self._kv_dtype)
        import torch

        return torch.zeros(shape, dtype=getattr(torch, self._kv_dtype.__name__), device="cuda")

    def _check_graph(
        self, session: ort.InferenceSession, inputs: list[TensorSpec], outputs: list[TensorSpec]
    ) -> None:
        for kind, specs, found in (
            ("input", inputs, [t.name for t in session.get_inputs()]),
            ("output", outputs, [t.name for t in session.get_outputs()]),
        ):
            wanted = [s.name for s in specs]
            if sorted(found) != sorted(wanted):
                different = sorted(set(found) ^ set(wanted))
                raise EngineError(
                    f"{self._name} does not have the {kind}s this version expects "
                    f"(differing: {', '.join(different)}): run `make engines`"
                )


def _usable_providers() -> list[str]:
    available = ort.get_available_providers()
    # The GPU package lists CUDA on machines without one; loading it there only prints an error.
    return available if Path("/dev/nvidiactl").exists() else ["CPUExecutionProvider"]


def _session(path: Path, device: str, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Each session has its own threads, and those of one that has just run would go on spinning on
    # the cores that the other needs: drafting took twice as long, verifying 1.6 times.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        providers.insert(0, "CUDAExecutionProvider")
    try:
        return ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:
        raise EngineError(f"{path} cannot be loaded by ONNX Runtime: {error}") from error


def _pointer(array: Any) -> int:
    pointer: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return pointer
