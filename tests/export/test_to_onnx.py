"""Tracing one part and placing it several times, and where weights are stored."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from export import to_onnx
from export.to_onnx import ALIGNMENT, GraphBuilder, Part, trace
from runtime.spec import TensorSpec

INPUTS = [TensorSpec("x", "fp32", ("N", 4))]
OUTPUTS = [TensorSpec("y", "fp32", ("N", 4))]


class TwoScales(nn.Module):
    """(x * first) * second: parameters that are equal, and small enough to be folded."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4,), first))
        self.second = nn.Parameter(torch.full((4,), second))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first * self.second


@pytest.fixture(scope="module")
def part() -> Part:
    return trace(TwoScales(1.0, 1.0), [(torch.zeros(37, 4),), (torch.zeros(2, 4),)], ["x"], ["y"])


def chain(part: Part, modules: list[TwoScales]) -> GraphBuilder:
    """y = the modules in turn, each a copy of `part`."""
    builder, value = GraphBuilder(), "x"
    for i, module in enumerate(modules):
        outputs = {"y": "y"} if module is modules[-1] else {}
        value = builder.add(part, f"layers.{i}.", module, {"x": value}, outputs)["y"]
    return builder


def run(path: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])


def test_every_copy_has_its_own_weights(part: Part, tmp_path: Path) -> None:
    """Equal parameters of the traced module must not become one, nor part of a constant."""
    modules = [TwoScales(2.0, 3.0), TwoScales(5.0, 7.0)]
    chain(part, modules).save(tmp_path / "graph.onnx", INPUTS, OUTPUTS)
    for rows in (1, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(run(tmp_path / "graph.onnx", x), x * 2 * 3 * 5 * 7)


def test_a_shared_parameter_is_stored_once(part: Part) -> None:
    modules = [TwoScales(2.0, 3.0), TwoScales(5.0, 7.0)]
    modules[1].first = modules[0].first
    weights = chain(part, modules).weights
    assert list(weights) == ["layers.0.first", "layers.0.second", "layers.1.second"]


def test_large_weights_go_to_one_file_beside(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_onnx, "MAX_INLINE_BYTES", 60)
    path = tmp_path / "graph.onnx"
    builder = chain(part, [TwoScales(2.0, 3.0), TwoScales(5.0, 7.0)])
    assert builder.save(path, INPUTS, OUTPUTS) == [path, tmp_path / "graph.onnx.data"]
    x = torch.randn(3, 4)
    torch.testing.assert_close(run(path, x), x * 2 * 3 * 5 * 7)
    model = onnx.load(path, load_external_data=False)
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert len(external) == 4
    places = [{e.key: e.value for e in t.external_data} for t in external]
    assert {p["location"] for p in places} == {"graph.onnx.data"}
    assert all(int(p["offset"]) % ALIGNMENT == 0 for p in places)


def test_small_weights_stay_in_the_file(part: Part, tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    assert chain(part, [TwoScales(2.0, 3.0)]).save(path, INPUTS, OUTPUTS) == [path]
    assert list(tmp_path.iterdir()) == [path]
