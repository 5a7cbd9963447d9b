"""ONNX to a TensorRT plan, with `tensorrt` (10.x, 11.x) or `tensorrt_rtx`, whichever is installed.

Both have one API as far as it is used here; what only some versions have is looked for. Precision
is the graph's own (a strongly typed network). TensorRT reports much by return values and log lines
alone, so each is read and anything but success is a BuildError with TensorRT's own words.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from engines.graph_rules import violations
from engines.profiles import Profile, ProfileError, dynamic, shapes
from export.progress import say
from runtime.config import MIB
from runtime.manifest import TENSORRT, Builder
from runtime.spec import TensorSpec
from runtime.trt_engine import SHOWN_ERRORS, log_of

# Said of every int64 tensor, all of which are meant to be int64.
EXPECTED_WARNING = "has Int64 binding"
FATAL_WARNING = "Unused Input"


class BuildError(Exception):
    """The engines cannot be built here; the message says why in one sentence."""


@dataclass(frozen=True)
class PlanOptions:
    """How to build. Compute capabilities are names as SM86; none means the GPU that is present."""

    compute_capabilities: tuple[str, ...] = ()
    workspace_mb: int = 0  # 0 leaves TensorRT its default, all of the GPU's memory
    hardware_compatibility: str = "none"  # none | ampere_plus | same_compute_capability


def find_tensorrt() -> ModuleType:
    """The installed TensorRT module, the full product before RTX.

    Raises BuildError naming what to install.
    """
    for name in TENSORRT:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise BuildError(
        "neither tensorrt nor tensorrt_rtx can be imported: run `make install`, which brings "
        "TensorRT-RTX, or `.venv/bin/pip install '.[tensorrt]'` on a machine with an NVIDIA GPU"
    )


def builder_of(trt: Any) -> Builder:
    """Name and version of the module, as the manifest records them."""
    return Builder(str(trt.__name__), str(trt.__version__))


def build_plan(
    trt: Any,
    graph: Path,
    plan_path: Path,
    inputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
    options: PlanOptions,
    timing_cache: Path | None = None,
) -> None:
    """Build `graph` into `plan_path` with one optimisation profile per entry of `profiles`.

    `timing_cache` is read if it is there, and written. Raises BuildError when the graph breaks a
    rule of `engines.graph_rules`, lacks an input, or TensorRT is not content with anything.
    """
    broken = violations(graph)
    if broken:
        shown = "; ".join(map(str, broken[:SHOWN_ERRORS]))
        raise BuildError(f"{graph.name} breaks {len(broken)} graph rules: {shown}")
    log = log_of(trt)
    log.take()
    _judge_warnings(log)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse_from_file(str(graph))
    errors = [_describe(parser.get_error(i)) for i in range(parser.num_errors)]
    if not parsed or errors:
        raise BuildError(f"TensorRT cannot parse {graph.name}: {'; '.join(errors[:SHOWN_ERRORS])}")
    _check_inputs(graph, network, inputs)
    config = builder.create_builder_config()
    _configure(trt, config, options)
    for profile in profiles:
        _add_profile(graph, builder, config, inputs, profile)
    cache = None if timing_cache is None else _load_timing_cache(log, config, timing_cache)
    monitor = _make_monitor(trt, graph.stem)
    config.progress_monitor = monitor
    try:
        plan = builder.build_serialized_network(network, config)
    finally:
        monitor.close()
    said = log.take()
    if said or plan is None:
        raise BuildError(f"TensorRT cannot build {graph.name}: {said or 'it did not say why'}")
    plan_path.write_bytes(memoryview(plan))
    if cache is not None and timing_cache is not None:
        partial = timing_cache.with_name(timing_cache.name + ".partial")
        with _without_deprecations():
            partial.write_bytes(memoryview(cache.serialize()))
        partial.replace(timing_cache)


def _judge_warnings(log: Any) -> None:
    """Make a warning that means a wrong engine an error, and show the others."""

    def judge(message: str) -> None:
        if FATAL_WARNING in message:
            log.errors.append(message)
        elif EXPECTED_WARNING not in message:
            say(f"  {message}")

    log.on_warning = judge


def _describe(error: Any) -> str:
    return f"node {error.node_name()} ({error.node_operator()}): {error.desc()}"


def _check_inputs(graph: Path, network: Any, inputs: Sequence[TensorSpec]) -> None:
    found = {network.get_input(i).name for i in range(network.num_inputs)}
    different = sorted(found ^ {spec.name for spec in inputs})
    if different:
        raise BuildError(
            f"{graph.name} does not have the inputs this version expects "
            f"(differing: {', '.join(different)}): run `make engines` to export it again"
        )


def _configure(trt: Any, config: Any, options: PlanOptions) -> None:
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 means fp32: exactness is the arithmetic's
    if config.get_flag(trt.BuilderFlag.TF32):
        raise BuildError(f"{trt.__name__} does not switch TF32 off")
    if options.workspace_mb:
        pool, size = trt.MemoryPoolType.WORKSPACE, options.workspace_mb * MIB
        config.set_memory_pool_limit(pool, size)
        if config.get_memory_pool_limit(pool) != size:
            raise BuildError(
                f"{trt.__name__} does not take a workspace of {options.workspace_mb} MB: "
                f"its limit is {config.get_memory_pool_limit(pool) // MIB} MB"
            )
    if options.hardware_compatibility != "none":
        level = _member(trt.HardwareCompatibilityLevel, options.hardware_compatibility.upper())
        config.hardware_compatibility_level = level
        if config.hardware_compatibility_level != level:
            raise BuildError(
                f"{trt.__name__} {trt.__version__} does not take the hardware compatibility "
                f"{options.hardware_compatibility}"
            )
    if options.compute_capabilities:
        _set_compute_capabilities(trt, config, options.compute_capabilities)


def _set_compute_capabilities(trt: Any, config: Any, names: Sequence[str]) -> None:
    if not hasattr(config, "set_compute_capability"):
        raise BuildError(
            f"{trt.__name__} {trt.__version__} builds for the GPU it runs on: leave "
            f"COMPUTE_CAPABILITY empty, got {','.join(names)}"
        )
    config.num_compute_capabilities = len(names)
    for i, name in enumerate(names):
        capability = _member(trt.ComputeCapability, name)
        taken = config.set_compute_capability(capability, i)
        if not taken or config.get_compute_capability(i) != capability:
            raise BuildError(f"{trt.__name__} {trt.__version__} does not build for {name}")


def _member(enum: Any, name: str) -> Any:
    members = enum.__members__
    if name not in members:
        raise BuildError(f"{enum.__name__} must be one of {', '.join(members)}, got {name!r}")
    return members[name]


def _add_profile(
    graph: Path, builder: Any, config: Any, inputs: Sequence[TensorSpec], sizes: Profile
) -> None:
    profile = builder.create_optimization_profile()
    for spec in dynamic(inputs):
        try:
            wanted = shapes(spec, sizes)
            profile.set_shape(spec.name, *wanted)
        except (ProfileError, ValueError) as error:
            raise BuildError(f"no profile for {graph.name}: {error}") from error
        taken = tuple(tuple(shape) for shape in profile.get_shape(spec.name))
        if taken != wanted:
            raise BuildError(
                f"no profile for {graph.name}: TensorRT made {taken} of {wanted} for {spec.name}"
            )
    if not profile or config.add_optimization_profile(profile) == -1:
        raise BuildError(f"no profile for {graph.name}: TensorRT refuses {dict(sizes)}")


def _load_timing_cache(log: Any, config: Any, path: Path) -> Any:
    known = path.read_bytes() if path.is_file() else b""
    with _without_deprecations():
        for content in (known, b""):
            # A cache of another GPU or version is refused; then an empty one takes its place.
            cache = config.create_timing_cache(content)
            taken = cache is not None and config.set_timing_cache(cache, False)
            failed = log.take()
            if taken and not failed:
                return cache
    raise BuildError(f"TensorRT takes neither the timing cache {path} nor an empty one")


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    """RTX has the timing cache's calls, without effect, and says so each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _make_monitor(trt: Any, title: str) -> Any:
    class Monitor(trt.IProgressMonitor):
        """One bar for the outermost phase; inner phases give it its text."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.bar = tqdm(desc=title, unit="step", leave=False, disable=None)
            self.outermost = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            """A phase of `num_steps` steps begins inside `parent_phase`."""
            if not parent_phase:
                self.outermost = phase_name
                self.bar.reset(total=num_steps)
            self.bar.set_postfix_str(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            """Whether to go on; a phase may end before its last step."""
            if phase_name == self.outermost:
                self.bar.update(1)
            return True

        def phase_finish(self, phase_name: str) -> None:
            """The phase has ended."""

        def close(self) -> None:
            """Remove the bar."""
            self.bar.close()

    return Monitor()
