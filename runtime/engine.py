"""What the loop needs of an engine, whichever library runs it, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.manifest import Artifact, Manifest, ManifestError
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
    name = manifest.builder.name
    if name != "onnxruntime":
        raise ManifestError(
            f"{engine_dir} was built by {name}, which this version does not run: "
            "run `make engines` to build ONNX Runtime engines"
        )
    from runtime.ort_engine import OrtEngine

    def load(
        artifact: Artifact, kv: KvDims, inputs: list[TensorSpec], outputs: list[TensorSpec]
    ) -> Engine:
        return OrtEngine(engine_dir / artifact.path, kv, inputs, outputs, num_blocks, threads)

    dims = manifest.verifier
    verifier = load(
        manifest.artifacts["verifier"], dims.kv, verifier_inputs(dims), verifier_outputs(dims)
    )
    draft = manifest.drafter
    if draft is None:
        return Engines(verifier, None)
    drafter = load(
        manifest.artifacts["drafter"], draft.kv, drafter_inputs(draft), drafter_outputs(draft)
    )
    return Engines(verifier, drafter)
