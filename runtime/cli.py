"""`dspark generate`: the runtime without Triton, streaming to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config import ConfigError, RuntimeConfig
from runtime.manifest import ManifestError
from runtime.request import PARAMETERS, InvalidRequest, Parameter, RequestOutput

if TYPE_CHECKING:
    from runtime.engine import LoadEngines

_COLOURS = {"draft": "\033[32m", "corrected": "\033[33m", "target": ""}
_RESET = "\033[0m"
# Request parameters that are options of their own, or mean nothing to one prompt on a terminal.
_OTHERS = ("prompt_ids", "max_tokens", "stream", "policy")
_REQUEST_OPTIONS = [p for p in PARAMETERS.values() if p.name not in _OTHERS and not p.unserved]


def add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    """Which built model; shared by every command that uses one."""
    parser.add_argument("--name", default="smollm2", help="built model (default: %(default)s)")
    parser.add_argument(
        "--build-dir", type=Path, default=Path("build"), help="default: %(default)s"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which built model to open, and on how many threads; shared by every offline command."""
    add_folder_arguments(parser)
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="of the engine; 0 (default): all cores",
    )


def open_model(args: argparse.Namespace, load: LoadEngines | None = None, **options: Any) -> Any:
    """The `Model` that `add_model_arguments` named; `options` go to RuntimeConfig, `load` to it.

    The prefix cache is off unless they say otherwise, so that one run does not warm the next.
    """
    from runtime.decoder import Model
    from runtime.engine import load_engines

    config = RuntimeConfig(num_threads=args.threads, **{"prefix_cache_mb": 0, **options})
    folder = args.build_dir / args.name
    return Model(folder / "engines", folder / "hf", config, load or load_engines)


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text for one prompt, without Triton",
        description="Generate text for one prompt and end with a line of statistics.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    parser.add_argument("--prompt", required=True, help="user message")
    parser.add_argument("--raw-prompt", action="store_true", help="do not use the chat template")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=RuntimeConfig.default_max_tokens,
        metavar="N",
        help="most tokens to generate (default: %(default)s)",
    )
    for parameter in _REQUEST_OPTIONS:
        _add_request_option(parser, parameter)
    parser.add_argument(
        "--policy",
        default=RuntimeConfig.policy,
        help="off, fixed[:k], threshold[:base], throughput, lagged or auto (default: %(default)s)",
    )
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="colour accepted draft tokens green and corrected ones yellow",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(func=_generate)


def _add_request_option(parser: argparse.ArgumentParser, parameter: Parameter) -> None:
    option = f"--{parameter.name.replace('_', '-')}"
    if parameter.type is bool:
        parser.add_argument(option, action="store_true", default=None, help=parameter.help)
        return
    shown = "" if parameter.range_text == "any" else f"; {parameter.range_text}"
    if parameter.default not in (None, ()):
        shown += f" (default: {parameter.default})"
    parser.add_argument(
        option,
        type=str if parameter.type is dict else parameter.type,
        nargs="+" if parameter.is_list else None,
        metavar="X",
        help=f"{parameter.help}{shown}",
    )


Command = Callable[[argparse.Namespace], int]


def run_guarded(command: Command) -> Command:
    """Wrap a command so that a user's mistake ends in one sentence and exit code 1."""

    def guarded(args: argparse.Namespace) -> int:
        from runtime.engine import EngineError

        mistakes = (ConfigError, EngineError, InvalidRequest, ManifestError, FileNotFoundError)
        try:
            return command(args)
        except mistakes as error:
            print(f"dspark: {error}", file=sys.stderr)
            return 1

    return guarded


@run_guarded
def _generate(args: argparse.Namespace) -> int:
    from runtime.request import validate_request
    from runtime.text import Detokenizer

    model = open_model(args, policy=args.policy, max_batch_requests=1)
    loop = model.make_loop()
    prompt_ids = model.tokenizer.encode_prompt(
        args.prompt, args.raw_prompt, model.config.max_prompt_bytes
    )
    fields = {p.name: getattr(args, p.name) for p in _REQUEST_OPTIONS}
    request = validate_request(
        {"prompt_ids": prompt_ids, "max_tokens": args.max_tokens, "stream": True, **fields},
        model.limits,
    )
    outputs: list[RequestOutput] = []
    coloured = Detokenizer(model.tokenizer)

    def show(output: RequestOutput) -> None:
        outputs.append(output)
        if args.json:
            return
        text = output.text
        if args.show_drafts:
            text = "".join(
                f"{_COLOURS[origin]}{coloured.push(token_id)}{_RESET}"
                for token_id, origin in zip(output.token_ids, output.origins, strict=True)
            )
        print(text, end="", flush=True)

    start = time.perf_counter()
    loop.add(request, show)
    while loop.has_work:
        loop.step()
    seconds = time.perf_counter() - start
    model.close()

    final = outputs[-1]
    stats = final.stats
    summary: dict[str, Any] = {
        "finish_reason": final.finish_reason,
        "num_input_tokens": final.num_input_tokens,
        "num_output_tokens": final.num_output_tokens,
        "tokens_per_s": round(final.num_output_tokens / seconds, 2),
        "time_to_first_token_s": round(stats["time_to_first_token_s"], 4),
        "accepted_length": round(accepted_length(stats), 3),
        "seed": request.seed,
    }
    if args.json:
        text = "".join(output.text for output in outputs)
        ids = [i for output in outputs for i in output.token_ids]
        if request.return_log_probs:
            summary["log_probs"] = [value for output in outputs for value in output.log_probs]
        print(json.dumps({"text": text, "output_ids": ids, **summary}))
    else:
        print(
            f"\n\n{summary['num_input_tokens']} prompt tokens, "
            f"{summary['num_output_tokens']} tokens ({summary['finish_reason']}), "
            f"{summary['tokens_per_s']} tokens/s, "
            f"first token after {summary['time_to_first_token_s']} s, "
            f"{summary['accepted_length']} tokens per round"
            + (f", log-probability {final.cum_log_probs:.3f}" if request.return_log_probs else ""),
            file=sys.stderr,
        )
    return 0


def accepted_length(stats: dict[str, float]) -> float:
    """Mean tokens per decoding round, the target's own one counted; 0 without a round."""
    rounds = stats["num_rounds"]
    return (rounds + stats["num_accepted_draft_tokens"]) / rounds if rounds else 0.0
