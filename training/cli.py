"""Command-line entry points of `training`: `train-data`, `train` and `judge-drafter`.

Only argparse is imported here at the top, so that `dspark --help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from runtime.cli import add_model_arguments, run_guarded


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults to the help, but not where there is none worth naming."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required or action.default in (None, False, []):
            return action.help
        return super()._get_help_string(action)


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this folder's subcommands; each sets ``func``, which returns an exit code."""
    _add_train_data(subparsers)
    _add_train(subparsers)
    _add_judge(subparsers)


def _add_train_data(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train-data",
        help="let the target answer self-made prompts, as training data for its drafter",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--out", type=Path, required=True, help="path stem; STEM.tok.bin and STEM.meta.jsonl"
    )
    parser.add_argument(
        "--tokens", type=int, default=550_000, help="stop when the store holds this many tokens"
    )
    parser.add_argument("--slots", type=int, default=64, help="texts in flight at once")
    parser.add_argument(
        "--max-answer-tokens", type=int, default=320, help="longest answer, in tokens"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=160, help="longest prompt, in tokens"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides every prompt and every draw")
    parser.set_defaults(func=run_train_data)


def _add_train(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a drafter for a target",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the run")
    parser.add_argument(
        "--work-dir", type=Path, help="cache, checkpoints and logs (default build/training/NAME)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one key of the file, VALUE in TOML; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in the work folder"
    )
    parser.add_argument(
        "--no-fill-cache",
        action="store_true",
        help="train on what is cached already instead of running the target first",
    )
    _add_device(parser)
    parser.set_defaults(func=run_train)


def _add_judge(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "judge-drafter",
        help="accepted lengths and confidence of a drafter on prompt sets",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    parser.add_argument("--drafter", type=Path, required=True, help="drafter folder")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", required=True, help='.jsonl files of {"turns": [...]}'
    )
    parser.add_argument(
        "--work-dir", type=Path, required=True, help="keeps the target's answers and features"
    )
    parser.add_argument("--count", type=int, default=40, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--slots", type=int, default=40, help="texts in flight at once")
    parser.add_argument(
        "--block-size", type=int, help="draft tokens a round (default: the drafter's own)"
    )
    parser.add_argument("--device", default="cpu", help="torch device of the judged drafter")
    parser.set_defaults(func=run_judge)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="torch device, for example cpu or cuda")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads, 0 leaves torch's choice"
    )


def _set_threads(args: argparse.Namespace) -> None:
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)


@run_guarded
def run_train_data(args: argparse.Namespace) -> int:
    """Entry point of ``train-data``."""
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from training.data import ChatFormat, DataConfig, DataError, generate_data
    from training.generate import RuntimeEngine
    from training.store import StoreError

    folder = args.build_dir / args.name
    try:
        config = DataConfig(
            num_tokens=args.tokens,
            max_prompt_tokens=args.max_prompt_tokens,
            max_answer_tokens=args.max_answer_tokens,
            seed=args.seed,
        )
        longest = config.max_prompt_tokens + max(
            config.max_answer_tokens, config.max_message_tokens
        )
        engine = RuntimeEngine(folder, args.slots, longest, args.threads)
        chat = ChatFormat(AutoTokenizer.from_pretrained(folder / "hf"))
        with tqdm(total=args.tokens, unit="tok", mininterval=5.0) as bar:
            total = generate_data(args.out, config, chat, engine, bar.update)
    except (DataError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{total} tokens in {args.out}.tok.bin")
    return 0


def run_train(args: argparse.Namespace) -> int:
    """Entry point of ``train``."""
    _set_threads(args)
    from training.checkpoint import DrafterCheckpointError
    from training.config import TrainConfigError, parse_overrides, read_config
    from training.drafter import DrafterConfigError
    from training.features import CacheError
    from training.store import StoreError
    from training.target import TargetError
    from training.train import TrainError, train

    try:
        config = read_config(args.config, parse_overrides(args.set))
        work_dir = args.work_dir or Path("build/training") / config.name
        best = train(config, work_dir, args.device, args.resume, not args.no_fill_cache)
    except (
        CacheError,
        DrafterCheckpointError,
        DrafterConfigError,
        StoreError,
        TargetError,
        TrainConfigError,
        TrainError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"best drafter: {best}")
    return 0


@run_guarded
def run_judge(args: argparse.Namespace) -> int:
    """Entry point of ``judge-drafter``: a table for people, then one line of JSON."""
    _set_threads(args)
    from dataclasses import asdict

    from transformers import AutoTokenizer

    from bench.prompts import read_prompts
    from training.benchmark import answer_prompts, cached_answers, judge
    from training.checkpoint import DrafterCheckpointError, load_drafter
    from training.data import ChatFormat, DataError
    from training.drafter import DrafterConfigError
    from training.features import CacheError
    from training.generate import RuntimeEngine
    from training.store import StoreError
    from training.target import Target, TargetError

    folder = args.build_dir / args.name
    reports: dict[str, Any] = {}
    try:
        raw = json.loads((args.drafter / "config.json").read_text(encoding="utf-8"))
        layer_ids = tuple(raw["target_layer_ids"])
        target = Target.load(folder / "hf", layer_ids, args.device)
        drafter = load_drafter(args.drafter, target.embedding, target.lm_head, args.block_size).to(
            args.device
        )
        chat = ChatFormat(AutoTokenizer.from_pretrained(folder / "hf"))
        args.work_dir.mkdir(parents=True, exist_ok=True)
        for path in args.prompts:
            prompts = read_prompts(path, args.count)
            longest = max(len(chat.prompt(prompt)) for prompt in prompts) + args.max_tokens
            answers = []
            for temperature in (0.0, 1.0):
                stem = (
                    args.work_dir / f"{path.stem}_n{args.count}_m{args.max_tokens}_t{temperature:g}"
                )
                engine = RuntimeEngine(folder, args.slots, longest, args.threads)
                answer_prompts(prompts, temperature, args.max_tokens, stem, chat, engine)
                engine.close()
                answers.append(cached_answers(stem, target))
            report = judge(drafter, answers[0], answers[1])
            reports[path.stem] = asdict(report) | {
                "greedy_length": report.greedy.greedy_length,
                "sampled_length": report.sampled.sampled_length,
            }
            print(
                f"{path.stem:12} {report.prompts} prompts: accepted length greedy "
                f"{report.greedy.greedy_length:.3f}, temperature 1 "
                f"{report.sampled.sampled_length:.3f}"
            )
    except (
        CacheError,
        DataError,
        DrafterCheckpointError,
        DrafterConfigError,
        FileNotFoundError,
        StoreError,
        TargetError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(reports))
    return 0
