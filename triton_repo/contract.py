"""What the served model takes and gives: the tables behind config.pbtxt, clients and the bridge.

Request parameters come from the runtime's own table, so a parameter that the runtime learns is
served without a line here; `docs/parameters.md` is made from both (`triton_repo.reference`).
Shapes are those of NVIDIA's LLM backend (a batch dimension, and scalars as [1]), so /generate takes
plain JSON scalars and existing clients work unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.request import PARAMETERS, Parameter

MODEL_NAME = "dspark"
UNARY_MODEL_NAME = "dspark_unary"
MAX_BATCH_ROWS = 64  # of one client's request; how many run at once is the decoder's affair
_INT32_MAX = 2**31 - 1

# What happens to a request outside the decoder.
SERVING_PARAMETERS: dict[str, Parameter] = {
    p.name: p
    for p in (
        Parameter("text_input", str, None, help="the prompt: one user message"),
        Parameter("raw_prompt", bool, False, help="text_input without the chat template"),
        Parameter(
            "exclude_input_in_output",
            bool,
            True,
            help="false: text_output and output_ids begin with the prompt",
        ),
        Parameter("return_output_ids", bool, False, help="fill output_ids"),
        Parameter("return_finish_reason", bool, True, help="fill finish_reason"),
        Parameter("return_num_input_tokens", bool, True, help="fill num_input_tokens"),
        Parameter("return_num_output_tokens", bool, True, help="fill num_output_tokens"),
    )
}


@dataclass(frozen=True)
class Tensor:
    """One input or output: `datatype` without the TYPE_ prefix, one value or a list of them."""

    name: str
    datatype: str
    is_list: bool = False
    help: str = ""


def _inputs_of(parameter: Parameter) -> list[Tensor]:
    if parameter.type is int:
        wide = parameter.high is not None and parameter.high > _INT32_MAX
        datatype = "UINT64" if wide else "INT32"
    else:
        datatype = {float: "FP32", bool: "BOOL", str: "STRING", dict: "STRING"}[parameter.type]
    return [
        Tensor(name, datatype, parameter.is_list, parameter.help)
        for name in (parameter.name, *parameter.aliases)
    ]


INPUTS: dict[str, Tensor] = {
    tensor.name: tensor
    for parameter in (*SERVING_PARAMETERS.values(), *PARAMETERS.values())
    for tensor in _inputs_of(parameter)
}

OUTPUTS: dict[str, Tensor] = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_output", "STRING", help="the text, or what is new of it with `stream`"),
        Tensor("finish_reason", "STRING", help="length, stop or eos; empty before the last"),
        Tensor("num_input_tokens", "INT32", help="tokens of the prompt, the chat template's too"),
        Tensor("num_output_tokens", "INT32", help="tokens generated so far, an end token counted"),
        Tensor("output_ids", "INT32", is_list=True, help="their ids, with `return_output_ids`"),
        Tensor(
            "output_log_probs",
            "FP32",
            is_list=True,
            help="log-probability of each of these tokens, with `return_log_probs`",
        ),
        Tensor("cum_log_probs", "FP32", help="sum over all tokens so far, with `return_log_probs`"),
        Tensor(
            "acceptance_rate", "FP32", help="last response: accepted of the verified draft tokens"
        ),
        Tensor("total_accepted_draft_tokens", "INT32", help="last response: accepted draft tokens"),
        Tensor("total_draft_tokens", "INT32", help="last response: verified draft tokens"),
        Tensor("time_in_queue_s", "FP32", help="last response: arrival to first computation"),
        Tensor("time_to_first_token_s", "FP32", help="last response: arrival to first token"),
        Tensor("total_time_s", "FP32", help="last response: arrival to last token"),
        Tensor("batch_index", "INT32", help="row of a batched request that the response is for"),
    )
}


def _entry(tensor: Tensor, extra: str = "") -> str:
    dims = "-1" if tensor.is_list else "1"
    fields = f'name: "{tensor.name}" data_type: TYPE_{tensor.datatype} dims: [ {dims} ]{extra}'
    return f"  {{ {fields} }}"


def render_config(name: str = MODEL_NAME, on_gpu: bool = False) -> str:
    """config.pbtxt of a served model.

    The decoder batches by itself, hence one instance and no batching by Triton: on the first GPU
    where its engines need one, else KIND_CPU, which keeps Triton from starting one per GPU.
    """
    inputs = ",\n".join(_entry(tensor, " optional: true") for tensor in INPUTS.values())
    outputs = ",\n".join(_entry(tensor) for tensor in OUTPUTS.values())
    decoupled, rows = ("true", MAX_BATCH_ROWS) if name == MODEL_NAME else ("false", 1)
    instances = "kind: KIND_GPU count: 1 gpus: [ 0 ]" if on_gpu else "kind: KIND_CPU count: 1"
    return f"""\
name: "{name}"
backend: "python"
max_batch_size: {rows}
input [
{inputs}
]
output [
{outputs}
]
model_transaction_policy {{ decoupled: {decoupled} }}
instance_group [ {{ {instances} }} ]
"""
