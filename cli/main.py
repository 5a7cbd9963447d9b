"""`dspark`: one command whose subcommands wrap the folders' entry points."""

from __future__ import annotations

import argparse
import importlib
import sys

# Each of these registers its own subcommands; heavy imports wait until one is called.
COMMAND_MODULES = (
    "export.cli",
    "engines.cli",
    "triton_repo.cli",
    "runtime.cli",
    "training.cli",
    "bench.cli",
)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run one subcommand and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="dspark",
        description="DSpark speculative decoding on NVIDIA Triton.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMAND_MODULES:
        importlib.import_module(name).add_parsers(subparsers)
    args = parser.parse_args(argv)
    result: int = args.func(args)
    return result


if __name__ == "__main__":
    sys.exit(main())
