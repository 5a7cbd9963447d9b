"""Command-line entry points of `bench`."""

from __future__ import annotations

import argparse

from bench import evaluate


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this folder's subcommands."""
    evaluate.add_parser(subparsers)
