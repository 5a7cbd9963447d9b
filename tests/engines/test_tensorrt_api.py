"""Every name that the builder and the runner use of TensorRT, against the bindings of 10.13 and
11.4 as recorded by `record_tensorrt_api`, and against the installed TensorRT-RTX itself."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import tensorrt_rtx

from tests.engines.record_tensorrt_api import CLASSES, FOLDER, surface
from tests.runtime import fake_tensorrt

RTX = f"tensorrt_rtx {tensorrt_rtx.__version__}"
SOURCES = ("engines/tensorrt_builder.py", "runtime/trt_engine.py")
# What variables hold. A new one fails a test until it stands here.
RECEIVERS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "network.get_input(i)": "ITensor",
    "parser": "OnnxParser",
    "error": "ParserError",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "cache": "ITimingCache",
    "plan": "IHostMemory",
    "self._runtime": "Runtime",
    "self._engine": "ICudaEngine",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "tier.context": "IExecutionContext",
}
# Used only where they are found.
RTX_ONLY = {
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "IBuilderConfig.get_compute_capability",
}


class Member(NamedTuple):
    """One way to use a member: its parameters (None where it is not called), what it returns."""

    required: int = 0
    parameters: tuple[str, ...] | None = None
    returned: str = ""
    settable: bool = False


Api = dict[str, list[Member]]


def parse(lines: list[str]) -> Api:
    """Members by `Class.name`."""
    api: Api = defaultdict(list)
    for line in lines:
        name, _, rest = line.partition("(")
        if not rest:
            api[name.removesuffix(" =")].append(Member(settable=name.endswith(" =")))
            continue
        inside, _, returned = rest.partition(")")
        parts = [p for p in inside.split(", ") if p]
        required = sum(not p.endswith("=") for p in parts)
        names = tuple(p.rstrip("=") for p in parts)
        api[name].append(Member(required, names, returned.removeprefix(" -> ")))
    return api


APIS = {path.stem: parse(path.read_text().splitlines()) for path in sorted(FOLDER.iterdir())}
APIS[RTX] = parse(surface(tensorrt_rtx))


class Use(NamedTuple):
    """A name in the source; with the number of arguments where it is called."""

    name: str
    arguments: int | None
    place: str
    is_set: bool = False


def uses(source: str) -> list[Use]:
    """All uses of TensorRT in one file. Raises AssertionError for a variable without a class."""
    tree = ast.parse(Path(source).read_text())
    calls = {id(n.func): _arguments(n) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            receiver, name, place = ast.unparse(node.value), node.attr, f"{source}:{node.lineno}"
            arguments = calls.get(id(node))
            owner = RECEIVERS.get(receiver, receiver.removeprefix("trt."))
            if receiver == "trt" and name in CLASSES and arguments is not None:
                owner, name = name, "__init__"
            elif name == "__init__" and arguments is not None:
                arguments -= 1  # of a base class, which is given self
            if owner in CLASSES:
                is_set = isinstance(node.ctx, ast.Store)
                found.append(Use(f"{owner}.{name}", arguments, place, is_set))
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(b).removeprefix("trt.") for b in node.bases]
            overridden = (f for f in node.body if isinstance(f, ast.FunctionDef))
            for function in overridden if set(bases) & set(CLASSES) else ():
                name, place = f"{bases[0]}.{function.name}", f"{source}:{function.lineno}"
                arguments = len(function.args.args) - 1
                if any(name in api for api in APIS.values()):
                    found.append(Use(name, arguments, place))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made_by = ast.unparse(node.value.func)
            receiver, _, method = made_by.rpartition(".")
            members = APIS[RTX].get(f"{RECEIVERS.get(receiver)}.{method}", [])
            returned = {m.returned for m in members} - {""}
            if receiver == "trt" and method in CLASSES:
                returned = {method}
            target = ast.unparse(node.targets[0])
            assert returned <= {RECEIVERS.get(target)}, f"{source}:{node.lineno}: what is {target}?"
    return found


def _arguments(call: ast.Call) -> int | None:
    """How many there are; None where that is not to be seen."""
    return None if any(isinstance(a, ast.Starred) for a in call.args) else len(call.args)


USES = [use for source in SOURCES for use in uses(source)]


def lacks(api: Api, use: Use) -> bool:
    members = api.get(use.name, [])
    if use.arguments is None:
        return not any(m.settable or not use.is_set for m in members)
    return not any(
        m.parameters is not None and m.required <= use.arguments <= len(m.parameters)
        for m in members
    )


def test_both_generations_are_recorded() -> None:
    assert {name.split(".")[0] for name in APIS} == {"10", "11", RTX.split(".")[0]}
    assert len(USES) > 50
    assert {u.name.split(".")[0] for u in USES} | {"IHostMemory"} >= set(RECEIVERS.values())


@pytest.mark.parametrize("version", APIS)
def test_every_name_used_is_there(version: str) -> None:
    missing = {use.name: use for use in USES if lacks(APIS[version], use)}
    allowed = set() if version == RTX else RTX_ONLY
    assert missing.keys() == allowed, missing


def test_a_name_that_is_gone_or_called_otherwise_is_noticed() -> None:
    eleven = next(api for version, api in APIS.items() if version.startswith("11"))
    assert lacks(eleven, Use("BuilderFlag.FP16", None, ""))
    assert lacks(eleven, Use("ICudaEngine.device_memory_size", None, ""))
    assert lacks(eleven, Use("IExecutionContext.set_device_memory", 1, ""))
    assert lacks(eleven, Use("ICudaEngine.num_io_tensors", None, "", is_set=True))
    assert not lacks(eleven, Use("IExecutionContext.set_device_memory", 2, ""))


@pytest.mark.parametrize("version", APIS)
def test_the_stand_in_offers_nothing_that_is_not_there(version: str) -> None:
    """Public names of the fakes are TensorRT's, with TensorRT's parameters."""
    fakes = {
        "Runtime": fake_tensorrt.FakeRuntime,
        "ICudaEngine": fake_tensorrt.FakeEngine,
        "IExecutionContext": fake_tensorrt.FakeContext,
        "ILogger": fake_tensorrt.FakeILogger,
    }
    own_attributes = re.compile(r"\bself\.([a-z]\w*)")
    offered = {
        name: {*vars(fake), *own_attributes.findall(inspect.getsource(fake))}
        for name, fake in fakes.items()
    }
    for enum in ("DataType", "ExecutionContextAllocationStrategy", "TensorIOMode"):
        offered[enum] = set(vars(getattr(fake_tensorrt.FAKE_TENSORRT, enum)))
    for cls, names in offered.items():
        for name in names:
            if name.startswith("_"):
                continue
            members = APIS[version].get(f"{cls}.{name}", [])
            assert members, f"{cls}.{name}"
            fake = vars(fakes[cls]).get(name) if cls in fakes else None
            if inspect.isfunction(fake):
                own = tuple(inspect.signature(fake).parameters)[1:]
                assert own in {m.parameters for m in members}, f"{cls}.{name}{own}"
