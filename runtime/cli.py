"""Command-line entry points of `runtime`."""

from __future__ import annotations

import argparse


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this folder's subcommands."""
