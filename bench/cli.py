"""Command-line entry points of `bench`."""

from __future__ import annotations

import argparse

from bench import (
    article,
    evaluate,
    load,
    overhead,
    peers,
    perf,
    precision,
    prefix,
    record,
    shape,
    simulate,
    stream,
)


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `eval`, `bench` and `simulate`."""
    evaluate.add_parser(subparsers)
    parser = subparsers.add_parser(
        "bench", help="measurements beside peers and of a running server", allow_abbrev=False
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    peers.add_parser(kinds)
    prefix.add_parser(kinds)
    stream.add_parser(kinds)
    overhead.add_parser(kinds)
    perf.add_parser(kinds)
    load.add_parser(kinds)
    record.add_parser(kinds)
    article.add_parser(kinds)
    precision.add_parser(kinds)
    shape.add_parser(kinds)
    simulate.add_parser(subparsers)
