"""What the loop needs of an engine, whichever library runs it, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.manifest import SINGLE_TOKEN, TENSORRT, Manifest, ManifestError
from runtime.spec import (
    KvDims,
    TensorSpec,
    drafter_inputs,
    drafter_outputs,
    verifier_inputs,
    verifier_outputs,
)


class EngineError(RuntimeError):
    """The engine failed; the message names the engine, the tensor and the shape."""


class Engine(Protocol):
    """One graph and its KV pool. A step's keys and values never leave the engine's device."""

    def run(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; returns the outputs other than K/V, valid until the next run."""

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write K/V of packed rows [n] of the last run into flat pool slots [n]."""

    def read_block(self, block: int) -> NDArray[np.uint8]:
        """Copy one block of the pool to host memory.

        Returns [num_layers * 2 * b * Hk * D * item size] raw bytes, each layer's keys before its
        values (the order of `KvDims.pool_specs`).
        """

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Fill one block of the pool with what `read_block` gave."""

    def close(self) -> None:
        """Free the engine and its pool; may be called again."""


_INPUT_DTYPES = {"int64": np.int64, "fp32": np.float32}


def check_inputs(
    engine: str, specs: Mapping[str, TensorSpec], inputs: Mapping[str, NDArray]
) -> dict[str, int]:
    """The size of each dimension symbol in one call of `engine`.

    Raises EngineError when `inputs` are not exactly those of `specs` in name, dtype and shape, or
    one symbol has two sizes.
    """
    if inputs.keys() != specs.keys():
        raise EngineError(f"{engine} takes {sorted(specs)}, got {sorted(inputs)}")
    sizes: dict[str, int] = {}
    for name, array in inputs.items():
        spec = specs[name]
        fits = array.dtype == _INPUT_DTYPES[spec.dtype] and array.ndim == len(spec.dims)
        for dim, size in zip(spec.dims, array.shape, strict=False):
            fits &= (dim if isinstance(dim, int) else sizes.setdefault(dim, size)) == size
        if not fits:
            raise EngineError(
                f"{engine}: {name} must be {spec.dtype} {list(spec.dims)} with {sizes}, "
                f"got {array.dtype} {list(array.shape)}"
            )
    return sizes


class Engines:
    """Verifier and drafter (None for a model without one) over pools of the same blocks."""

    def __init__(self, verifier: Engine, drafter: Engine | None) -> None:
        self.verifier = verifier
        self.drafter = drafter

    def close(self) -> None:
        """Close both; may be called again."""
        self.verifier.close()
        if self.drafter is not None:
            self.drafter.close()


def load_engines(engine_dir: Path, manifest: Manifest, num_blocks: int, threads: int) -> Engines:
    """Load the engines that `manifest` describes, with pools of `num_blocks` blocks.

    Raises ManifestError when this machine cannot run them.
    """
    load = _loader(engine_dir, manifest, num_blocks, threads)
    dims = manifest.verifier
    verifier = load("verifier", dims.kv, verifier_inputs(dims), verifier_outputs(dims))
    draft = manifest.drafter
    if draft is None:
        return Engines(verifier, None)
    drafter = load("drafter", draft.kv, drafter_inputs(draft), drafter_outputs(draft))
    return Engines(verifier, drafter)


LoadEngines = Callable[[Path, Manifest, int, int], Engines]  # as `load_engines`
Load = Callable[[str, KvDims, Sequence[TensorSpec], Sequence[TensorSpec]], Engine]


def _loader(engine_dir: Path, manifest: Manifest, num_blocks: int, threads: int) -> Load:
    """What loads one engine of `manifest`: each library is imported only where it is used."""
    builder = manifest.builder.name
    paths = {name: engine_dir / artifact.path for name, artifact in manifest.artifacts.items()}
    if builder == "onnxruntime":
        from runtime.ort_engine import OrtEngine

        return lambda name, kv, inputs, outputs: OrtEngine(
            paths[name],
            kv,
            list(inputs),
            list(outputs),
            num_blocks,
            threads,
            paths.get(name + SINGLE_TOKEN),
        )
    if builder in TENSORRT:
        from runtime.trt_engine import CudaDevice, TrtEngine, load_tensorrt

        trt, device = load_tensorrt(manifest), CudaDevice()
        return lambda name, kv, inputs, outputs: TrtEngine(
            paths[name], kv, inputs, outputs, num_blocks, trt, device
        )
    raise ManifestError(
        f"{engine_dir} was built by {builder}, which this version does not run: "
        "run `make engines` to build ONNX Runtime engines"
    )
