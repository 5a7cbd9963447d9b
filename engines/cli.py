"""`dspark build`: ONNX to engines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engines.build import BuildError, build_engines
from export.cli import folder_name
from export.embedded import NAME
from export.errors import ExportError
from export.progress import say
from runtime.manifest import ManifestError


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `build`."""
    parser = subparsers.add_parser(
        "build",
        help="turn exported ONNX graphs into an engine folder",
        description="Build BUILD_DIR/NAME/engines for ONNX Runtime from BUILD_DIR/NAME/onnx. What "
        "did not change since the last run is not built again.",
        allow_abbrev=False,
    )
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
    parser.set_defaults(func=run_build)


def run_build(args: argparse.Namespace) -> int:
    """Run `dspark build`."""
    folder = args.build_dir / args.name
    try:
        built = build_engines(folder)
    except (BuildError, ManifestError, ExportError) as error:
        print(f"dspark build: {error}", file=sys.stderr)
        return 1
    say(f"built {folder / 'engines'}" if built else f"{folder / 'engines'} is up to date")
    return 0
