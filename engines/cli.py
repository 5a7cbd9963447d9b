"""`dspark build`, `dspark profile` and `dspark calibrate`: ONNX to engines, and their measures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from engines.build import BuildError, build_engines
from export.cli import folder_name
from export.embedded import NAME
from export.errors import ExportError
from export.progress import say
from runtime.config import ConfigError, RuntimeConfig
from runtime.manifest import ManifestError


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this folder's subcommands."""
    parser = subparsers.add_parser(
        "build",
        help="turn exported ONNX graphs into an engine folder",
        description="Build BUILD_DIR/NAME/engines for ONNX Runtime from BUILD_DIR/NAME/onnx. What "
        "did not change since the last run is not built again.",
        allow_abbrev=False,
    )
    _add_folder(parser)
    parser.set_defaults(func=run_build)

    parser = subparsers.add_parser(
        "profile",
        help="measure what steps cost on this machine",
        description="Measure drafting and verifying for the scheduler and write "
        "BUILD_DIR/NAME/engines/cost/cost.json with a plot. The table holds for these engines, "
        "this machine and this number of threads; an up-to-date one is not measured again.",
        allow_abbrev=False,
    )
    _add_folder(parser)
    _add_threads(parser)
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
    _add_folder(parser)
    _add_threads(parser)
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


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name",
        type=folder_name,
        default=NAME,
        help="name of the pair's build folder (default: %(default)s)",
    )
    parser.add_argument(
        "--build-dir",
        type=Path,
        default=Path("build"),
        help="folder for everything built (default: %(default)s)",
    )


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="of the engines; 0 (default): all cores, as the server does",
    )


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


def run_build(args: argparse.Namespace) -> int:
    """Run `dspark build`."""
    folder = args.build_dir / args.name
    return _run("build", "built", folder / "engines", lambda: build_engines(folder))


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
