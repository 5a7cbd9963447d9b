"""`dspark`: one command whose subcommands wrap the folders' entry points."""

from __future__ import annotations

import argparse
import importlib
import os
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

# Weights in huge pages: a step that reads all of them is 4 to 7 % shorter. The C library looks at
# its options once, when a process starts; what this one starts, Triton too, inherits them.
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run one subcommand and return its exit code."""
    if argv is None and sys.platform == "linux" and TUNABLES not in os.environ:
        os.environ[TUNABLES] = HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
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
