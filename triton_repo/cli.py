"""Command-line entry points of `triton_repo`."""

from __future__ import annotations

import argparse


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this folder's subcommands."""
