"""`dspark bench perf`: NVIDIA's perf_analyzer against the served model, policy by policy.

The program comes in the wheel of an older tritonclient, of which nothing else is used. It streams
over gRPC at each concurrency; the table is computed from its export, where every response has its
time. All answers have the same number of tokens, so tokens are known without looking at them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from bench.prompts import read_prompts
from runtime.cli import add_folder_arguments, run_guarded
from runtime.config import ConfigError, RuntimeConfig
from triton_repo.contract import MODEL_NAME
from triton_repo.server import Address, ServerError, TritonServer

WHEEL = "tritonclient==2.50.0"  # the last release that carries perf_analyzer
ATTEMPTS = 5  # now and then the program ends without an error and with half of its export written
_DEBIAN_PACKAGES = {"libb64.so.0d": "libb64-0d"}
_PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a list.",
    "Name three colours and say what each of them reminds you of.",
    "Explain why the sky is blue to a child.",
    "Give me a recipe for pancakes.",
    "Who wrote Faust, and what is it about?",
    "If a train leaves at nine and arrives at noon, how long did it take?",
    "Summarise the rules of chess in a few sentences.",
)


class Row(NamedTuple):
    """What clients saw at one concurrency; times in milliseconds."""

    concurrency: int
    requests: int
    tokens_per_s: float
    first_token_ms: float  # median
    first_token_p99_ms: float
    inter_token_ms: float  # mean
    request_ms: float  # median


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench perf`."""
    parser = subparsers.add_parser(
        "perf",
        help="NVIDIA's perf_analyzer against a server of its own, for several policies",
        description="Start the server, run perf_analyzer on it for each policy, print a table.",
        allow_abbrev=False,
    )
    add_folder_arguments(parser)
    parser.add_argument(
        "--concurrency",
        default="1:8",
        metavar="FROM:TO[:STEP]",
        help="clients at once (default: %(default)s)",
    )
    parser.add_argument(
        "--policies", default="off,fixed", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts", type=Path, help='JSON lines of {"turns": [...]} (default: 8 short ones)'
    )
    parser.add_argument(
        "--max-tokens", type=int, default=32, metavar="N", help="of each answer (default: 32)"
    )
    parser.add_argument(
        "--requests", type=int, default=16, metavar="N", help="per concurrency (default: 16)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/perf"), help="exports (default: %(default)s)"
    )
    parser.set_defaults(func=_perf)


@run_guarded
def _perf(args: argparse.Namespace) -> int:
    try:
        _run(args)
    except ServerError as error:
        raise ConfigError(str(error)) from error
    return 0


def _run(args: argparse.Namespace) -> None:
    prompts = read_prompts(args.prompts, 0) if args.prompts else list(_PROMPTS)
    program, environment = prepare_perf_analyzer(args.out / "tools")
    work_dir = args.build_dir / args.name
    config = RuntimeConfig(prefix_cache_mb=0)  # or one policy would warm the next
    print(f"starting Triton (log: {work_dir / 'serve.log'})", flush=True)
    with TritonServer(work_dir / "repository", work_dir, Address(), config) as server:
        for policy in args.policies.split(","):
            inputs = args.out / f"inputs-{policy.replace(':', '-')}.json"
            inputs.write_text(json.dumps(make_inputs(prompts, policy, args.max_tokens)))
            rows = [
                measure(program, environment, server.address, inputs, clients, args)
                for clients in concurrencies(args.concurrency)
            ]
            _print_table(policy, rows)
    print(f"exports and inputs: {args.out}")


def concurrencies(text: str) -> list[int]:
    """Numbers of clients from FROM:TO[:STEP] or one number; raises ConfigError."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){0,2}", text):
        raise ConfigError(f"concurrency must be FROM:TO or FROM:TO:STEP, got {text!r}")
    first, *more = map(int, text.split(":"))
    last, step = (more + [first, 1][len(more) :])[:2]
    return list(range(first, last + 1, step))


def make_inputs(prompts: Sequence[str], policy: str, max_tokens: int) -> dict[str, Any]:
    """perf_analyzer's input file: the prompts in turn, under one policy, all equally long."""
    fields = {"max_tokens": max_tokens, "stream": True, "ignore_eos": True, "policy": policy}
    return {
        "data": [
            {"text_input": [prompt], **{name: [value] for name, value in fields.items()}}
            for prompt in prompts
        ]
    }


def prepare_perf_analyzer(folder: Path) -> tuple[Path, dict[str, str]]:
    """The program and its environment, fetched into `folder` on the first call.

    Raises ConfigError naming a system library that is missing and the package that has it.
    """
    program = folder / "perf_analyzer"
    if not program.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(folder, program)
    try:
        libraries = Path(str(metadata.distribution("nvidia-pytriton").locate_file("")))
    except metadata.PackageNotFoundError as error:
        raise ConfigError("nvidia-pytriton is not installed: run `make install`") from error
    (cuda_runtime,) = (libraries / "nvidia_pytriton.libs").glob("libcudart-*.so.12*")
    link = folder / "libcudart.so.12"  # the name that the program looks for
    link.unlink(missing_ok=True)
    link.symlink_to(cuda_runtime)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder.resolve())}
    check = subprocess.run([program, "--version"], env=environment, capture_output=True, text=True)
    if missing := re.search(r"while loading shared libraries: (\S+?):", check.stderr):
        package = _DEBIAN_PACKAGES.get(missing[1], f"the package that holds {missing[1]}")
        raise ConfigError(
            f"perf_analyzer needs the system library {missing[1]}: install it "
            f"(Debian, Ubuntu: apt-get install {package})"
        )
    if check.returncode:
        raise ConfigError(f"perf_analyzer does not run here: {check.stderr.strip()[:200]}")
    return program, environment


def _fetch(folder: Path, program: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    # The wheel without programs would suit every machine; ask for the one with them.
    command += ["--only-binary=:all:", "--platform=manylinux1_x86_64", f"--dest={folder}"]
    fetched = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("tritonclient-*.whl"))
    if fetched.returncode or not wheels:
        raise ConfigError(f"{WHEEL} could not be fetched: {fetched.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/perf_analyzer"))
        program.write_bytes(wheel.read(name))
    program.chmod(0o755)
    wheels[0].unlink()


def measure(
    program: Path,
    environment: dict[str, str],
    address: Address,
    inputs: Path,
    clients: int,
    args: argparse.Namespace,
) -> Row:
    """Run the program at one concurrency. Raises ConfigError when it fails."""
    export = inputs.with_name(f"{inputs.stem.replace('inputs', 'export')}-{clients}.json")
    command = [str(program), "-m", MODEL_NAME, "-u", f"{address.client_host}:{address.grpc_port}"]
    command += ["-i", "grpc", "--async", "--streaming", f"--input-data={inputs}"]
    command += [f"--concurrency-range={clients}", f"--request-count={max(args.requests, clients)}"]
    command += [f"--profile-export-file={export}", "--max-threads=8"]
    for _ in range(ATTEMPTS):
        export.unlink(missing_ok=True)
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode or not export.is_file():
            raise ConfigError(f"perf_analyzer failed: {(run.stderr or run.stdout).strip()[-500:]}")
        try:
            return summarise(json.loads(export.read_text()), args.max_tokens)
        except json.JSONDecodeError:
            continue
    raise ConfigError(f"perf_analyzer left only a part of {export}, {ATTEMPTS} times: run it again")


def summarise(export: dict[str, Any], num_tokens: int) -> Row:
    """A row from perf_analyzer's export of one experiment, whose times are in nanoseconds."""
    (experiment,) = export["experiments"]
    requests = [r for r in experiment["requests"] if r["response_timestamps"]]
    starts = [r["timestamp"] for r in requests]
    firsts = [r["response_timestamps"][0] for r in requests]
    lasts = [r["response_timestamps"][-1] for r in requests]
    first_ms = sorted((b - a) / 1e6 for a, b in zip(starts, firsts, strict=True))
    gaps_ms = [(b - a) / 1e6 / (num_tokens - 1) for a, b in zip(firsts, lasts, strict=True)]
    return Row(
        concurrency=experiment["experiment"]["value"],
        requests=len(requests),
        tokens_per_s=len(requests) * num_tokens / ((max(lasts) - min(starts)) / 1e9),
        first_token_ms=statistics.median(first_ms),
        first_token_p99_ms=first_ms[min(len(first_ms) - 1, int(0.99 * len(first_ms)))],
        inter_token_ms=statistics.mean(gaps_ms),
        request_ms=statistics.median((b - a) / 1e6 for a, b in zip(starts, lasts, strict=True)),
    )


def _print_table(policy: str, rows: list[Row]) -> None:
    print(f"\n{policy}")
    print("  ".join(f"{name:>18}" for name in Row._fields))
    for row in rows:
        print("  ".join(f"{value:>18.4g}" for value in row), flush=True)
