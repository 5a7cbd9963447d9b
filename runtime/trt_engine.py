"""TensorRT engine: a plan, its KV pool on the GPU, and one stream for everything it does.

Tensors are bound by name and checked against the plan's profiles before they reach TensorRT, whose
own answers to a wrong shape are log lines. A step that fits the `decode` profile is padded with
zeros to one of a few sizes (a tier); from its second time on a tier replays a CUDA graph. Padding
changes nothing that is read: a request of no tokens sees nothing, and rows beyond the real ones
are dropped.

Every graph needs an execution context of its own; all share one scratch buffer, since the stream
runs one of them at a time.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine import EngineError, check_inputs
from runtime.manifest import Manifest, ManifestError
from runtime.spec import KvDims, TensorSpec

log = logging.getLogger("dspark")

SHOWN_ERRORS = 5
MAX_TIERS = 48  # contexts and graphs kept, the least recently used go
# Padding S would renumber `unpad_index`; it takes few values anyway.
PADDED = ("R", "N", "C", "M", "L")
REBUILD = "run `make engines TARGET=tensorrt` on this machine"
DATA_TYPES = {"int64": "INT64", "fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}


class Replay(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None:
        """Enqueue what was captured."""


class CudaDevice:
    """The GPU as far as the engine needs it: memory, one stream, graphs."""

    name = "cuda"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.stream = torch.cuda.Stream()

    @property
    def stream_handle(self) -> int:
        """The stream as TensorRT takes it."""
        handle: int = self.stream.cuda_stream
        return handle

    def on_stream(self) -> Any:
        """A context in which torch's own work goes to the stream."""
        return self._torch.cuda.stream(self.stream)

    def pinned(self, tensor: Any) -> Any:
        """`tensor`, from the host, in memory that copies asynchronously."""
        return tensor.pin_memory()

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """What `enqueue` puts on the stream, as a graph; nothing runs yet."""
        graph = self._torch.cuda.CUDAGraph()
        # Other threads may go on using CUDA while this one captures.
        mode = "thread_local"
        with self._torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode):
            enqueue()
        replay: Replay = graph
        return replay


def load_tensorrt(manifest: Manifest) -> Any:
    """The module that built the engines of `manifest`, if its plans run here.

    Raises ManifestError for another version or another class of GPU, naming the command that
    rebuilds.
    """
    name, version = manifest.builder.name, manifest.builder.version
    built = f"the engines were built by {name} {version}"
    try:
        trt = importlib.import_module(name)
    except ImportError as error:
        raise ManifestError(
            f"{built}, which cannot be imported here ({error}): {REBUILD}"
        ) from error
    if str(trt.__version__) != version:
        raise ManifestError(f"{built}, this machine has {trt.__version__}: {REBUILD}")
    import torch

    if not torch.cuda.is_available():
        raise ManifestError(
            f"{built}, and there is no NVIDIA GPU here: run `make engines` for ONNX Runtime"
        )
    check_gpu(manifest, *torch.cuda.get_device_capability())
    return trt


def check_gpu(manifest: Manifest, major: int, minor: int) -> None:
    """Raise ManifestError when the plans are not for a GPU of this compute capability."""
    wanted = manifest.device.get("compute_capabilities", [])
    own = f"SM{major}{minor}"
    if not wanted or own in wanted:
        return
    level = manifest.device.get("hardware_compatibility")
    if level == "ampere_plus" and major >= 8:
        return
    raise ManifestError(
        f"the engines were built for {', '.join(wanted)}, this GPU is {own}: {REBUILD}, "
        f"or elsewhere with COMPUTE_CAPABILITY={own}"
    )


@dataclass
class _Tier:
    """One combination of padded sizes: its context, and its graph from the second time on."""

    context: Any
    graph: Replay | None = None


@functools.cache
def log_of(trt: Any) -> Any:
    """The one log of the module `trt`: TensorRT goes on using the first that it was given."""

    class Log(trt.ILogger):
        """Keeps errors until they are taken and passes warnings on."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.on_warning: Callable[[str], None] = log.warning

        def log(self, severity: Any, message: str) -> None:
            """Called by TensorRT for every line."""
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message.strip())
            elif severity == trt.ILogger.WARNING:
                self.on_warning(f"TensorRT: {message.strip()}")

        def take(self) -> str:
            """The first errors since the last call, as one text; empty without any."""
            text = "; ".join(self.errors[:SHOWN_ERRORS])
            self.errors.clear()
            return text

    return Log()


class TrtEngine:
    """See `runtime.engine.Engine`."""

    def __init__(
        self,
        path: Path,
        kv: KvDims,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        num_blocks: int,
        trt: Any,
        device: Any,
    ) -> None:
        """Load the plan at `path` with the module `trt` on a CudaDevice, which engines may share.

        Raises EngineError when the plan cannot be loaded, is not of this contract, or does not
        take a pool of `num_blocks` blocks.
        """
        import torch

        self._torch = torch
        self._device = device
        self._name = path.stem
        num_kv = 2 * kv.num_layers
        self._all = {spec.name: spec for spec in (*inputs, *outputs)}
        self._inputs = {s.name: s for s in inputs[: len(inputs) - num_kv]}
        self._outputs = list(outputs[: len(outputs) - num_kv])
        self._pool_specs, self._new_specs = inputs[-num_kv:], outputs[-num_kv:]
        self._log = log_of(trt)
        self._runtime: Any = trt.Runtime(self._log)
        self._engine: Any = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineError(
                f"{path} cannot be loaded by {trt.__name__} {trt.__version__} "
                f"({self._why()}): {REBUILD}"
            )
        self._check_plan(trt, inputs, outputs)
        self._profiles = self._read_profiles([*inputs])
        self._check_pool(num_blocks)
        self._strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED

        dtype = self._torch_dtype(kv.dtype)
        row = (kv.num_kv_heads, kv.head_dim)
        with self._device.on_stream():
            self._pool: Any = self._empty(
                (num_kv, num_blocks, kv.block_tokens, *row), dtype
            ).zero_()
            most = self._largest([*self._new_specs[:1]])[self._new_specs[0].name]
            self._new: Any = self._empty((num_kv, *most), dtype)
            self._buffers = {
                name: self._empty((max(1, math.prod(shape)),), self._torch_dtype(self._dtype(name)))
                for name, shape in self._largest([*self._inputs.values(), *self._outputs]).items()
            }
            self._scratch: Any = self._empty(
                (max(1, int(self._engine.device_memory_size_v2)),), torch.uint8
            )
        self._pool_rows = self._pool.view(num_kv, num_blocks * kv.block_tokens, *row)
        self._staging: dict[str, Any] = {}
        self._tiers: OrderedDict[tuple[int, ...], _Tier] = OrderedDict()

    def run(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; see `Engine.run`. Raises EngineError naming what does not fit."""
        self._check_open()
        sizes = check_inputs(self._name, self._inputs, inputs)
        profile = self._choose_profile(sizes)
        padded = self._padded(sizes, profile)
        with self._device.on_stream():
            for name, spec in self._inputs.items():
                self._copy_in(spec, inputs[name], padded)
            self._execute(profile, padded)
            results = {spec.name: self._copy_out(spec, sizes) for spec in self._outputs}
        self._device.synchronize()
        return {name: host.numpy() for name, host in results.items()}

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write new K/V into the pool; see `Engine.commit`."""
        self._check_open()
        with self._device.on_stream():
            to, take = (
                self._torch.from_numpy(np.ascontiguousarray(i)).to(self._pool.device)
                for i in (slots, rows)
            )
            self._pool_rows[:, to] = self._new[:, take]

    def read_block(self, block: int) -> NDArray[np.uint8]:
        """Copy a block to host memory; see `Engine.read_block`."""
        self._check_open()
        with self._device.on_stream():
            raw: NDArray[np.uint8] = (
                self._pool[:, block].contiguous().view(self._torch.uint8).cpu().numpy()
            )
        return raw.reshape(-1)

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Fill a block; see `Engine.write_block`."""
        self._check_open()
        with self._device.on_stream():
            raw = self._torch.from_numpy(data.copy()).view(self._pool.dtype)
            self._pool[:, block] = raw.view(self._pool[:, block].shape).to(self._pool.device)

    def close(self) -> None:
        """Free contexts, engine and pool, in this order; may be called again."""
        if self._engine is None:
            return
        self._device.synchronize()
        self._tiers.clear()
        self._pool = self._pool_rows = self._new = self._scratch = None
        self._buffers, self._staging = {}, {}
        self._engine = self._runtime = None

    def _why(self) -> str:
        return self._log.take() or "it did not say why"

    def _check_open(self) -> None:
        if self._engine is None:
            raise EngineError(f"{self._name} is closed")

    # What the plan says about itself

    def _check_plan(
        self, trt: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> None:
        engine = self._engine
        names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        different = sorted(names ^ self._all.keys())
        if different:
            raise EngineError(
                f"{self._name} does not have the inputs and outputs this version expects "
                f"(differing: {', '.join(different)}): {REBUILD}"
            )
        modes = [(inputs, trt.TensorIOMode.INPUT), (outputs, trt.TensorIOMode.OUTPUT)]
        for spec, mode in ((s, mode) for specs, mode in modes for s in specs):
            dims = tuple(d if isinstance(d, int) else -1 for d in spec.dims)
            dtype = getattr(trt.DataType, DATA_TYPES[spec.dtype])
            found = (
                engine.get_tensor_mode(spec.name),
                engine.get_tensor_dtype(spec.name),
                tuple(engine.get_tensor_shape(spec.name)),
            )
            if found != (mode, dtype, dims):
                raise EngineError(
                    f"{self._name}: {spec.name} must be {(mode, dtype, dims)}, the plan has "
                    f"{found}: {REBUILD}"
                )

    def _read_profiles(self, inputs: Sequence[TensorSpec]) -> list[dict[str, tuple[int, int]]]:
        """Least and greatest size of each symbol, by profile; what all tensors allow."""
        result = []
        for index in range(self._engine.num_optimization_profiles):
            ranges: dict[str, tuple[int, int]] = {}
            for spec in inputs:
                low, _, high = self._engine.get_tensor_profile_shape(spec.name, index)
                for dim, least, most in zip(spec.dims, low, high, strict=True):
                    if isinstance(dim, str):
                        before = ranges.get(dim, (least, most))
                        ranges[dim] = (max(before[0], least), min(before[1], most))
            result.append(ranges)
        return result

    def _check_pool(self, num_blocks: int) -> None:
        most = min(profile["P"][1] for profile in self._profiles)
        if num_blocks > most:
            raise EngineError(
                f"the {self._name}'s plan takes pools of at most {most} blocks, kv_cache_mb and "
                f"prefix_cache_mb ask for {num_blocks}: lower them, or build with them in SERVING"
            )

    def _largest(self, specs: Sequence[TensorSpec]) -> dict[str, tuple[int, ...]]:
        """The greatest shape of each tensor over all profiles."""
        return {
            spec.name: tuple(
                d if isinstance(d, int) else max(p[d][1] for p in self._profiles) for d in spec.dims
            )
            for spec in specs
        }

    # One run

    def _choose_profile(self, sizes: Mapping[str, int]) -> int:
        for index, profile in enumerate(self._profiles):
            if all(profile[s][0] <= n <= profile[s][1] for s, n in sizes.items()):
                return index
        limits = {s: [f"{p[s][0]} to {p[s][1]}" for p in self._profiles] for s in sizes}
        outside = ", ".join(
            f"{s} is {n} (profiles: {' or '.join(limits[s])})"
            for s, n in sizes.items()
            if not any(p[s][0] <= n <= p[s][1] for p in self._profiles)
        )
        raise EngineError(
            f"{self._name}: {outside or f'no profile takes {dict(sizes)} together'}: "
            "build with a SERVING that allows it"
        )

    def _padded(self, sizes: Mapping[str, int], profile: int) -> dict[str, int]:
        """Sizes of the tier; only the first profile, decoding, has tiers."""
        if profile != 0:
            return dict(sizes)
        ranges = self._profiles[0]
        return {
            s: min(1 << (n - 1).bit_length(), ranges[s][1]) if s in PADDED and n else n
            for s, n in sizes.items()
        }

    def _copy_in(self, spec: TensorSpec, array: NDArray, sizes: Mapping[str, int]) -> None:
        shape = self._shape(spec, sizes)
        host = self._host(spec, shape)
        view = host.numpy()
        if view.shape != array.shape:
            view[...] = 0
        view[tuple(slice(n) for n in array.shape)] = array
        self._device_view(spec.name, shape).copy_(host, non_blocking=True)

    def _copy_out(self, spec: TensorSpec, sizes: Mapping[str, int]) -> Any:
        # Only the first dimension of an output is dynamic: the real rows are its beginning.
        shape = self._shape(spec, sizes)
        host = self._host(spec, shape)
        host.copy_(self._device_view(spec.name, shape), non_blocking=True)
        return host

    def _execute(self, profile: int, sizes: Mapping[str, int]) -> None:
        key = (profile, *(sizes[s] for s in sorted(sizes))) if profile == 0 else (profile,)
        tier = self._tiers.get(key)
        known = tier is not None
        if tier is None:
            tier = _Tier(self._make_context(profile))
            self._tiers[key] = tier
            if len(self._tiers) > MAX_TIERS:
                self._device.synchronize()  # the oldest may still be running
                self._tiers.popitem(last=False)
        self._tiers.move_to_end(key)
        if not known or profile != 0:
            self._bind(tier.context, sizes)
        if tier.graph is None and known and profile == 0 and self._can_capture(tier.context):
            tier.graph = self._device.capture(lambda: self._enqueue(tier.context, sizes))
        if tier.graph is not None:
            tier.graph.replay()
        else:
            self._enqueue(tier.context, sizes)

    def _can_capture(self, context: Any) -> bool:
        asks = getattr(context, "is_stream_capturable", None)  # RTX, which compiles while running
        return asks is None or bool(asks(self._device.stream_handle))

    def _enqueue(self, context: Any, sizes: Mapping[str, int]) -> None:
        if not context.execute_async_v3(self._device.stream_handle):
            raise EngineError(f"{self._name} failed with {dict(sizes)}: {self._why()}")

    def _make_context(self, profile: int) -> Any:
        context = self._engine.create_execution_context(self._strategy)
        if context is None:
            raise EngineError(f"{self._name} has no execution context: {self._why()}")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        if not context.set_optimization_profile_async(profile, self._device.stream_handle):
            raise EngineError(f"{self._name} refuses profile {profile}: {self._why()}")
        return context

    def _bind(self, context: Any, sizes: Mapping[str, int]) -> None:
        """Give `context` the shape of every input and the address of every tensor."""
        sizes = {**sizes, "P": self._pool.shape[1]}
        addresses = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}
        addresses |= _layers(self._pool_specs, self._pool) | _layers(self._new_specs, self._new)
        for spec in (*self._inputs.values(), *self._pool_specs):
            shape = self._shape(spec, sizes)
            if not context.set_input_shape(spec.name, shape):
                raise EngineError(
                    f"{self._name} refuses {spec.name} of shape {shape}: {self._why()}"
                )
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise EngineError(f"{self._name} refuses memory for {name}: {self._why()}")
        missing = context.infer_shapes()
        if missing:
            raise EngineError(f"{self._name} lacks the shapes of {', '.join(missing)}")
        for spec in (*self._outputs, *self._new_specs):
            shape, made = self._shape(spec, sizes), tuple(context.get_tensor_shape(spec.name))
            if made != shape:
                raise EngineError(f"{self._name}: {spec.name} must be {shape}, would be {made}")

    # Memory

    def _dtype(self, name: str) -> str:
        return self._all[name].dtype

    def _torch_dtype(self, dtype: str) -> Any:
        names = {"int64": "int64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
        return getattr(self._torch, names[dtype])

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._torch.empty(shape, dtype=dtype, device=self._device.name)

    def _shape(self, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else sizes[d] for d in spec.dims)

    def _device_view(self, name: str, shape: tuple[int, ...]) -> Any:
        return self._buffers[name][: math.prod(shape)].view(shape)

    def _host(self, spec: TensorSpec, shape: tuple[int, ...]) -> Any:
        """A pinned host tensor of this shape; its memory is reused from run to run."""
        flat = self._staging.get(spec.name)
        size = math.prod(shape)
        if flat is None or flat.numel() < size:
            fresh = self._torch.empty(max(1, size), dtype=self._torch_dtype(spec.dtype))
            flat = self._staging[spec.name] = self._device.pinned(fresh)
        return flat[:size].view(shape)


def _layers(specs: Sequence[TensorSpec], stacked: Any) -> dict[str, int]:
    return {spec.name: stacked[i].data_ptr() for i, spec in enumerate(specs)}
