"""`dspark export`: checkpoints to ONNX."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from export.embedded import NAME
from export.errors import ExportError
from export.pair import EMBEDDED, ExportOptions, export_pair


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `export`."""
    parser = subparsers.add_parser(
        "export",
        help="turn a checkpoint, and its drafter, into ONNX graphs checked against PyTorch",
        description="Export a language model, and a DSpark drafter trained for it, to "
        "BUILD_DIR/NAME/onnx. Each graph is compared with its checkpoint and refused when they "
        "disagree. What did not change since the last run is not made again.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        default=EMBEDDED,
        help="Hugging Face folder (config.json and safetensors), .gguf file, or 'embedded' "
        "(SmolLM2-135M-Instruct, downloaded once) (default: %(default)s)",
    )
    parser.add_argument(
        "--name",
        type=folder_name,
        help=f"name of the pair's build folder (default: {NAME} for the embedded model, else the "
        "name of the model's folder or file)",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "bf16"),
        default="fp32",
        help="dtype of weights, activations and KV cache (default: %(default)s)",
    )
    parser.add_argument(
        "--drafter",
        type=Path,
        help="folder of a DSpark drafter in DeepSpec's layout (default: none, plain decoding only)",
    )
    parser.add_argument(
        "--build-dir",
        type=Path,
        default=Path("build"),
        help="folder for everything built (default: %(default)s)",
    )
    parser.add_argument(
        "--atol",
        type=float,
        help="largest absolute difference allowed between logits of the graph and of the "
        "checkpoint (default: 0.001 for fp32, 0.25 for fp16, 2 for bf16)",
    )
    parser.set_defaults(func=run_export)


def folder_name(value: str) -> str:
    """Argument type: a name of one folder, not a path."""
    if value in (".", "..") or Path(value).name != value:
        raise argparse.ArgumentTypeError(f"must be a plain folder name, got {value!r}")
    return value


def default_name(model: str) -> str:
    """The build folder's name for a model given without one."""
    return NAME if model == EMBEDDED else Path(model).resolve().stem


def run_export(args: argparse.Namespace) -> int:
    """Run `dspark export`."""
    options = ExportOptions(
        model=args.model,
        name=args.name or default_name(args.model),
        dtype=args.dtype,
        drafter=args.drafter,
        build_dir=args.build_dir,
        atol=args.atol,
    )
    try:
        export_pair(options)
    except ExportError as error:
        print(f"dspark export: {error}", file=sys.stderr)
        return 1
    return 0
