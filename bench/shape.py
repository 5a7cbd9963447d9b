"""`dspark bench shape`: random weights of Qwen3-4B's widths through export and build.

Two depths give the cost of a layer, and with it an estimate for the whole model; the deeper is then
done again with a drafter. Each stage runs as a command of its own, so that its peak memory is the
one that the kernel reports for it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.build import TENSORRT
from export.progress import say
from runtime.manifest import load_manifest

# Widths of Qwen/Qwen3-4B, and of a drafter as DeepSpec trains for it.
TARGET: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
TARGET_LAYERS = 36
DRAFTER_LAYERS, BLOCK_SIZE, NUM_TAPS, MARKOV_RANK = 5, 7, 5, 256
SERVING = {"max_model_tokens": 4096}
GB = 1e9


@dataclass(frozen=True)
class Stage:
    """One command: its time, its peak resident memory, and what it left."""

    seconds: float
    cpu_seconds: float  # of all threads; unlike the time, no matter what else the machine does
    peak_bytes: int
    verifier_bytes: int
    drafter_bytes: int  # 0 without a drafter


Report = dict[str, dict[str, Stage]]  # by command and by what it was run on


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench shape`."""
    parser = subparsers.add_parser(
        "shape",
        help="export and build a model of Qwen3-4B's widths with random weights",
        description="Export and build random models of Qwen3-4B's widths at two depths, the deeper "
        "one with a drafter, and estimate the same for all 36 layers.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layers", type=int, nargs=2, default=(2, 6), metavar="N", help="default: 2 6"
    )
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16")
    parser.add_argument("--compute-capability", default="SM89", metavar="SM86")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/shape"),
        help="for some 10 GB, removed afterwards (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report here as JSON")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    few, many = args.layers
    if not NUM_TAPS < many > few > 0:
        print(
            f"dspark: --layers must be two ascending depths, the second above {NUM_TAPS}, "
            f"got {few} {many}",
            file=sys.stderr,
        )
        return 1
    report: Report = {"export": {}, "build": {}}
    for layers, with_drafter in ((few, False), (many, False), (many, True)):
        name = f"{layers} layers" + (" and drafter" if with_drafter else "")
        folder = args.work_dir / name.replace(" ", "_")
        shutil.rmtree(folder, ignore_errors=True)
        _make_checkpoints(folder, layers, with_drafter)
        stages = _stages(folder, args, with_drafter)
        shutil.rmtree(folder)
        if stages is None:
            return 1
        for command, stage in stages.items():
            report[command][name] = stage
            say(f"{command}, {name}: {stage.seconds:.0f} s, peak {stage.peak_bytes / GB:.1f} GB")
    for stages in report.values():
        low, high, _ = stages.values()
        stages[f"about {TARGET_LAYERS} layers"] = estimate(few, low, many, high)
    _print_table(report)
    if args.json:
        data = {command: {n: asdict(s) for n, s in own.items()} for command, own in report.items()}
        args.json.write_text(json.dumps(data, indent=2) + "\n")
    return 0


def _make_checkpoints(folder: Path, num_layers: int, with_drafter: bool) -> None:
    """Write `folder`/model and, if asked for, `folder`/drafter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from training.checkpoint import save_drafter
    from training.drafter import Drafter, DrafterConfig

    config = AutoConfig.for_model("qwen3", num_hidden_layers=num_layers, **TARGET)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    if not with_drafter:
        return
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    heads = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    drafter = DrafterConfig(
        **{name: TARGET[name] for name in (*same, *heads)},
        num_hidden_layers=DRAFTER_LAYERS,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        draft_vocab_size=TARGET["vocab_size"],
        block_size=BLOCK_SIZE,
        num_target_layers=num_layers,
        target_layer_ids=tuple(range(NUM_TAPS)),
        mask_token_id=TARGET["bos_token_id"],
        markov_rank=MARKOV_RANK,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    table = model.get_input_embeddings().weight.detach()
    save_drafter(Drafter(drafter, table, table), folder / "drafter")


def _stages(folder: Path, args: argparse.Namespace, with_drafter: bool) -> dict[str, Stage] | None:
    """Run both commands; None when one fails, which has said why."""
    (folder / "serving.json").write_text(json.dumps(SERVING))
    place = ["--name", "pair", "--build-dir", str(folder)]
    drafter = ["--drafter", str(folder / "drafter")] if with_drafter else []
    model = ["--model", str(folder / "model"), "--dtype", args.dtype, *drafter]
    target = ["--target", TENSORRT, "--config", str(folder / "serving.json")]
    target += ["--compute-capability", args.compute_capability]
    stages = {}
    commands = ((["export", *place, *model], "onnx"), (["build", *place, *target], "engines"))
    for command, output in commands:
        start = time.perf_counter()
        call = [sys.executable, "-m", "cli.main", *command]
        _, status, usage = os.wait4(os.posix_spawn(sys.executable, call, os.environ), 0)
        seconds = time.perf_counter() - start
        if status:
            return None
        artifacts = load_manifest(folder / "pair" / output).artifacts
        sizes = [artifacts[n].bytes if n in artifacts else 0 for n in ("verifier", "drafter")]
        cpu_seconds = usage.ru_utime + usage.ru_stime
        stages[command[0]] = Stage(seconds, cpu_seconds, usage.ru_maxrss << 10, *sizes)
    return stages


def estimate(few: int, low: Stage, many: int, high: Stage) -> Stage:
    """All layers, on the line through two depths."""
    steps = (TARGET_LAYERS - few) / (many - few)

    def extended(least: float, most: float) -> float:
        return least + (most - least) * steps

    return Stage(
        extended(low.seconds, high.seconds),
        extended(low.cpu_seconds, high.cpu_seconds),
        round(extended(low.peak_bytes, high.peak_bytes)),
        round(extended(low.verifier_bytes, high.verifier_bytes)),
        0,
    )


def _print_table(report: Report) -> None:
    columns = f"{'seconds':>8}  {'of CPU':>8}  {'peak GB':>8}  {'verifier GB':>11}  drafter GB"
    print(f"{'':>6}  {'':>20}  {columns}")
    for command, stages in report.items():
        for name, stage in stages.items():
            print(
                f"{command:>6}  {name:>20}  {stage.seconds:>8.0f}  {stage.cpu_seconds:>8.0f}  "
                f"{stage.peak_bytes / GB:>8.1f}  {stage.verifier_bytes / GB:>11.2f}  "
                f"{stage.drafter_bytes / GB:>10.2f}"
            )
