"""`dspark package` and `dspark serve`."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import threading
import time
from types import FrameType

from export.errors import ExportError
from runtime.cli import add_folder_arguments
from runtime.config import ConfigError, RuntimeConfig
from runtime.manifest import ManifestError
from triton_repo.contract import MODEL_NAME
from triton_repo.package import PackageError, package
from triton_repo.server import (
    ADMIN_ENDPOINTS,
    ADMIN_HEADER,
    GRPC_HEADER_PREFIX,
    Address,
    ServerError,
    TritonServer,
)
from triton_repo.standalone import package_standalone

_WATCH_PERIOD_S = 0.5


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this folder's subcommands."""
    parser = subparsers.add_parser(
        "package",
        help="package engines as a Triton model repository",
        description="Make build/NAME/repository from build/NAME/engines and build/NAME/hf.",
        allow_abbrev=False,
    )
    add_folder_arguments(parser)
    parser.add_argument(
        "--standalone",
        action="store_true",
        help="also make build/NAME/standalone: the engines as models of their own, to be profiled "
        "with perf_analyzer on a Triton that has their backend",
    )
    parser.set_defaults(func=run_package)

    parser = subparsers.add_parser(
        "serve",
        help="serve a packaged repository with Triton",
        description="Start Triton on build/NAME/repository; Ctrl-C stops everything it started.",
        allow_abbrev=False,
    )
    add_folder_arguments(parser)
    address = Address()
    parser.add_argument(
        "--host", default=address.host, help="address to listen on (default: %(default)s)"
    )
    for protocol, port in address.ports.items():
        parser.add_argument(
            f"--{protocol}-port",
            type=int,
            default=port,
            metavar="PORT",
            help=f"for {protocol} (default: %(default)s)",
        )
    parser.add_argument(
        "--admin-key",
        default="",
        metavar="KEY",
        help=f"opens Triton's endpoints {ADMIN_ENDPOINTS} to requests with the header "
        f"{ADMIN_HEADER}: KEY, over gRPC {GRPC_HEADER_PREFIX}{ADMIN_HEADER} (default: closed)",
    )
    options = parser.add_argument_group("decoder options (units are in the names)")
    for field in dataclasses.fields(RuntimeConfig):
        options.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(field.default),
            default=field.default,
            metavar="TEXT" if isinstance(field.default, str) else "N",
            help="default: %(default)s",
        )
    parser.set_defaults(func=run_serve)


def run_package(args: argparse.Namespace) -> int:
    """`dspark package`."""
    repository = args.build_dir / args.name / "repository"
    try:
        made = package(args.build_dir / args.name)
        if args.standalone:
            package_standalone(args.build_dir / args.name)
    except (PackageError, ManifestError, ExportError, OSError) as error:
        print(f"dspark package: {error}", file=sys.stderr)
        return 1
    print(f"{repository}: {'packaged' if made else 'up to date'}")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """`dspark serve`: returns when told to stop (0) or when the server cannot run (1)."""
    work_dir = args.build_dir / args.name
    stop, hurry = threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    try:
        config = RuntimeConfig(
            **{f.name: getattr(args, f.name) for f in dataclasses.fields(RuntimeConfig)}
        )
        address = Address(args.host, args.http_port, args.grpc_port, args.metrics_port)
        server = TritonServer(work_dir / "repository", work_dir, address, config, args.admin_key)
        _serve(server, stop, hurry)
    except (ConfigError, ServerError, OSError) as error:
        print(f"dspark serve: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(server: TritonServer, stop: threading.Event, hurry: threading.Event) -> None:
    started_s = time.monotonic()
    print(f"starting Triton on {server.repository} (log: {server.log_path})", flush=True)
    try:
        server.start()
        server.wait_until_ready(stop=stop)
        if not stop.is_set():
            _announce(server.address, time.monotonic() - started_s)
        while not stop.wait(_WATCH_PERIOD_S):
            if server.exit_code() is not None:
                raise ServerError(f"the server ended: {server.last_words()}")
    finally:
        print("stopping once running requests have ended; again: at once", flush=True)
        server.stop(hurry)


def _announce(address: Address, ready_s: float) -> None:
    ports = ", ".join(f"{protocol} {port}" for protocol, port in address.ports.items())
    body = '{"text_input": "What is the capital of France?", "max_tokens": 32}'
    print(
        f"ready after {ready_s:.1f} s on {address.host} ({ports}); Ctrl-C stops it. Try:\n\n"
        f"  curl -s {address.http_url}/v2/models/{MODEL_NAME}/generate -d '{body}'\n",
        flush=True,
    )
