"""`dspark build`, `dspark profile` and `dspark calibrate`: ONNX to engines, and their measures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from engines.build import ONNXRUNTIME, TARGETS, build_engines
from engines.tensorrt_builder import BuildError, PlanOptions
from export.errors import ExportError
from export.progress import say
from runtime.cli import add_folder_arguments, add_model_arguments
from runtime.config import ConfigError, RuntimeConfig, load_config
from runtime.manifest import ManifestError


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this folder's subcommands."""
    parser = subparsers.add_parser(
        "build",
        help="turn exported ONNX graphs into an engine folder",
        description="Build BUILD_DIR/NAME/engines for ONNX Runtime or TensorRT from "
        "BUILD_DIR/NAME/onnx. What did not change since the last run is not built again.",
        allow_abbrev=False,
    )
    add_folder_arguments(parser)
    _add_target(parser)
    parser.set_defaults(func=run_build)

    parser = subparsers.add_parser(
        "profile",
        help="measure what steps cost on this machine",
        description="Measure drafting and verifying for the scheduler and write "
        "BUILD_DIR/NAME/engines/cost/cost.json with a plot. The table holds for these engines, "
        "this machine and this number of threads; an up-to-date one is not measured again.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--max-requests",
        type=int,
        default=RuntimeConfig.max_batch_requests,
        metavar="N",
        help="requests at once that the table reaches to (default: %(default)s)",
    )
    parser.set_defaults(func=run_profile)

    parser = subparsers.add_parser(
        "calibrate",
        help="fit the drafter's confidences to what is accepted",
        description="Draft on self-made prompts, greedily and at temperature 1, fit the "
        "confidences to the outcomes and write BUILD_DIR/NAME/engines/calibration/calibration.json "
        "with reliability diagrams. Nothing is done when it is up to date.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="drafts for each of the two modes (default: 1200)"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='calibrate on these instead: JSON lines of {"turns": ["user message"]}',
    )
    parser.set_defaults(func=run_calibrate)


def _run(command: str, done: str, target: Path, work: Callable[[], bool]) -> int:
    """Do the work, say whether there was any, and turn a user's mistake into a sentence."""
    from runtime.engine import EngineError

    mistakes = (BuildError, ManifestError, ExportError, ConfigError, EngineError, FileNotFoundError)
    try:
        worked = work()
    except mistakes as error:
        print(f"dspark {command}: {error}", file=sys.stderr)
        return 1
    say(f"{done} {target}" if worked else f"{target} is up to date")
    return 0


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        choices=TARGETS,
        default=ONNXRUNTIME,
        help="what runs the engines; tensorrt is the installed tensorrt, else tensorrt_rtx "
        "(default: %(default)s)",
    )
    options = parser.add_argument_group("ONNX Runtime")
    options.add_argument(
        "--fp32-drafts",
        action="store_true",
        help="never draft in int8, which on CPUs is done where it is faster",
    )
    options = parser.add_argument_group("TensorRT")
    options.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="JSON of decoder options (as DSPARK_CONFIG) that the engines shall serve: "
        "max_batch_requests, prefill_chunk_tokens, max_model_tokens, kv_cache_mb, prefix_cache_mb "
        "(default: the decoder's defaults)",
    )
    options.add_argument(
        "--compute-capability",
        type=capabilities,
        default=(),
        metavar="SM86[,SM89...]",
        help="GPUs to build for, where the installed TensorRT can choose (default: the one here)",
    )
    options.add_argument(
        "--workspace-mb",
        type=int,
        default=PlanOptions.workspace_mb,
        metavar="N",
        help="most memory for one layer's scratch space; 0: no limit (default: %(default)s)",
    )
    options.add_argument(
        "--hardware-compatibility",
        choices=("none", "ampere_plus", "same_compute_capability"),
        default=PlanOptions.hardware_compatibility,
        help="other GPUs on which the plan runs too, at some cost in speed (default: %(default)s)",
    )


def capabilities(value: str) -> tuple[str, ...]:
    """Argument type: names of compute capabilities, separated by commas."""
    return tuple(name.strip().upper() for name in value.split(",") if name.strip())


def run_build(args: argparse.Namespace) -> int:
    """Run `dspark build`."""
    folder = args.build_dir / args.name

    def work() -> bool:
        config = load_config(args.config) if args.config else RuntimeConfig()
        options = PlanOptions(
            args.compute_capability, args.workspace_mb, args.hardware_compatibility
        )
        return build_engines(folder, args.target, config, options, not args.fp32_drafts)

    return _run("build", "built", folder / "engines", work)


def run_profile(args: argparse.Namespace) -> int:
    """Run `dspark profile`."""
    from engines.cost_profile import profile

    folder = args.build_dir / args.name

    def work() -> bool:
        return profile(folder, _threads(args), args.max_requests)

    return _run("profile", "measured", folder / "engines" / "cost", work)


def run_calibrate(args: argparse.Namespace) -> int:
    """Run `dspark calibrate`."""
    from bench.prompts import read_prompts
    from engines.calibrate import ROUNDS, calibrate

    folder = args.build_dir / args.name

    def work() -> bool:
        prompts = read_prompts(args.prompts, 0) if args.prompts else None
        return calibrate(folder, _threads(args), args.rounds or ROUNDS, prompts)

    return _run("calibrate", "fitted", folder / "engines" / "calibration", work)


def _threads(args: argparse.Namespace) -> int:
    return RuntimeConfig(num_threads=args.threads).engine_threads
