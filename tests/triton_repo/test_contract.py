"""config.pbtxt against Triton's own schema and the runtime's parameter table."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from runtime.request import PARAMETERS
from triton_repo.contract import INPUTS, MAX_BATCH_ROWS, OUTPUTS, UNARY_MODEL_NAME, render_config
from triton_repo.reference import render_reference


def parsed_config() -> ModelConfig:
    return text_format.Parse(render_config(), ModelConfig())


def test_config_is_valid_and_complete() -> None:
    config = parsed_config()
    assert [tensor.name for tensor in config.input] == list(INPUTS)
    assert [tensor.name for tensor in config.output] == list(OUTPUTS)
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == MAX_BATCH_ROWS
    assert len(config.instance_group) == 1


def test_the_unary_model_is_the_same_but_answers_once() -> None:
    unary = text_format.Parse(render_config(UNARY_MODEL_NAME), ModelConfig())
    assert not unary.model_transaction_policy.decoupled
    assert (list(unary.input), list(unary.output)) == (
        list(parsed_config().input),
        list(parsed_config().output),
    )


def test_the_reference_page_is_what_the_tables_say() -> None:
    """Otherwise: `python -m triton_repo.reference > docs/parameters.md`."""
    assert Path("docs/parameters.md").read_text() == render_reference()


def test_every_request_parameter_is_an_input() -> None:
    assert set(PARAMETERS) <= set(INPUTS)


def test_inputs_are_optional_and_have_the_types_llm_clients_send() -> None:
    config = parsed_config()
    assert all(tensor.optional for tensor in config.input)
    types = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in config.input}
    number = ModelConfig.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
    expected = {
        "text_input": ("TYPE_STRING", 1),
        "max_tokens": ("TYPE_INT32", 1),
        "stream": ("TYPE_BOOL", 1),
        "temperature": ("TYPE_FP32", 1),
        "seed": ("TYPE_UINT64", 1),
        "stop_words": ("TYPE_STRING", -1),
        "prompt_ids": ("TYPE_INT32", -1),
    }
    for name, (datatype, dim) in expected.items():
        assert types[name] == (number[datatype].number, [dim]), name
