"""An ONNX file with fp32 linear layers, to be written again with other nodes in their places."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_model

MAX_FILE_BYTES = 2**31 - 1  # more does not fit an ONNX file: it goes beside it

Weights = NDArray[np.float32]


class LinearGraph:
    """The graph in `source`; weights are read one by one, since they may be large."""

    def __init__(self, source: Path) -> None:
        self._folder = source.parent
        self._model = onnx.load(source, load_external_data=False)
        initializers = self._model.graph.initializer
        self._weights = {t.name: t for t in initializers if t.data_type == TensorProto.FLOAT}
        self._replaced: dict[str, list[NodeProto]] = {}  # by the output of what they replace
        self._stored: dict[str, TensorProto] = {}

    @property
    def layers(self) -> list[NodeProto]:
        """x W^T + bias with W [N, K]: Gemm nodes whose inputs are x, W and perhaps the bias."""
        nodes = self._model.graph.node
        return [n for n in nodes if n.op_type == "Gemm" and n.input[1] in self._weights]

    def size(self, layer: NodeProto) -> int:
        """How many weights the layer has."""
        return math.prod(self._weights[layer.input[1]].dims)

    def weight(self, layer: NodeProto) -> Weights:
        """Its W [N, K]."""
        return numpy_helper.to_array(self._weights[layer.input[1]], base_dir=str(self._folder))

    def store(self, name: str, array: NDArray | np.generic) -> str:
        """Keep a constant under a name of its own, once; returns what nodes call it."""
        name = f"stored.{name}"
        if name not in self._stored:
            array = np.ascontiguousarray(array).reshape(array.shape)  # that makes scalars vectors
            self._stored[name] = numpy_helper.from_array(array, name)
        return name

    def replace(self, layer: NodeProto, nodes: list[NodeProto]) -> None:
        """Put `nodes`, the last of which makes the layer's output, in its place."""
        self._replaced[layer.output[0]] = nodes

    def write(self, target: Path) -> list[Path]:
        """Write the graph with what was replaced; returns its files, none if nothing was.

        A second file holds weights that do not fit in the first.
        """
        if not self._replaced:
            return []
        graph = self._model.graph
        nodes = [n for own in graph.node for n in self._replaced.get(own.output[0], [own])]
        used = {name for node in nodes for name in node.input}
        kept = [tensor for tensor in graph.initializer if tensor.name in used]
        del graph.node[:], graph.initializer[:]
        graph.node.extend(nodes)
        graph.initializer.extend([*kept, *self._stored.values()])
        load_external_data_for_model(self._model, str(self._folder))
        self._model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        if sum(len(tensor.raw_data) for tensor in graph.initializer) < MAX_FILE_BYTES:
            onnx.save(self._model, target)
            return [target]
        data = target.with_name(target.name + ".data")
        onnx.save(self._model, target, save_as_external_data=True, location=data.name)
        return [target, data]
