"""What the served model takes and gives: the tables behind config.pbtxt, clients and the bridge.

Request parameters come from the runtime's own table, so a parameter that the runtime learns is
served without a line here. Shapes are those of NVIDIA's LLM backend (a batch dimension of one, and
scalars as [1]), so /generate takes plain JSON scalars and existing clients work unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.request import PARAMETERS, Parameter

MODEL_NAME = "dspark"
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Tensor:
    """One input or output: `datatype` without the TYPE_ prefix, one value or a list of them."""

    name: str
    datatype: str
    is_list: bool = False


def _input_of(parameter: Parameter) -> Tensor:
    if parameter.type is int:
        wide = parameter.high is not None and parameter.high > _INT32_MAX
        datatype = "UINT64" if wide else "INT32"
    else:
        datatype = {float: "FP32", bool: "BOOL", str: "STRING"}[parameter.type]
    return Tensor(parameter.name, datatype, parameter.is_list)


INPUTS: dict[str, Tensor] = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_input", "STRING"),
        Tensor("raw_prompt", "BOOL"),
        Tensor("return_output_ids", "BOOL"),
        *(_input_of(parameter) for parameter in PARAMETERS.values()),
    )
}

OUTPUTS: dict[str, Tensor] = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_output", "STRING"),
        Tensor("finish_reason", "STRING"),
        Tensor("num_input_tokens", "INT32"),
        Tensor("num_output_tokens", "INT32"),
        Tensor("output_ids", "INT32", is_list=True),
    )
}


def render_config() -> str:
    """config.pbtxt of the served model.

    The decoder batches by itself, hence one instance and a Triton batch of one: Triton then
    refuses a client's batch with a sentence. KIND_CPU keeps Triton from starting one per GPU.
    """

    def entry(tensor: Tensor, extra: str) -> str:
        dims = "-1" if tensor.is_list else "1"
        fields = f'name: "{tensor.name}" data_type: TYPE_{tensor.datatype} dims: [ {dims} ]{extra}'
        return f"  {{ {fields} }}"

    inputs = ",\n".join(entry(tensor, " optional: true") for tensor in INPUTS.values())
    outputs = ",\n".join(entry(tensor, "") for tensor in OUTPUTS.values())
    return f"""\
name: "{MODEL_NAME}"
backend: "python"
max_batch_size: 1
input [
{inputs}
]
output [
{outputs}
]
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""
