"""The cost table: what lies between its points, and what it refuses to be used for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from runtime import cost
from runtime.cost import CostTable, TableError, identity_of, load_cost, parse_cost
from tests.runtime.fakes import manifest

MANIFEST = manifest()
TABLE = CostTable(
    identity=identity_of(MANIFEST, 2),
    context_lens=(64, 128),
    requests=(1, 2, 4),
    segment_lens=(1, 2, 4),
    verify_s=(
        ((1.0, 2.0, 3.0), (2.0, 3.0, 4.0), (4.0, 6.0, 8.0)),
        ((2.0, 3.0, 4.0), (3.0, 4.0, 5.0), (5.0, 7.0, 9.0)),
    ),
    padding_s=(0.5, 1.0),
    draft_s=((1.0, 2.0, 3.0), (2.0, 3.0, 4.0)),
    context_token_s=0.5,
    prefill_token_s=0.25,
    repeats=3,
)


def test_measured_points_are_met_and_what_lies_between_is_linear() -> None:
    assert TABLE.verify_cost(1, 3, 64).tolist() == [1.0, 2.0, 2.5, 3.0]
    assert TABLE.verify_cost(2, 2, 64).tolist() == [2.0, 2.5, 3.0]  # half a token a request
    assert TABLE.verify_cost(3, 0, 64).tolist() == [3.0]
    assert TABLE.draft_cost(3, 64) == 2.5
    assert TABLE.draft_cost(4, 128) == 4.0


def test_short_contexts_cost_as_the_first_point_and_long_ones_go_on_rising() -> None:
    assert TABLE.verify_cost(1, 0, 0)[0] == 1.0
    assert TABLE.verify_cost(1, 0, 256)[0] == 4.0
    assert TABLE.draft_cost(1, 192) == 3.0


def test_padding_costs_by_the_token_and_more_in_long_contexts() -> None:
    assert TABLE.padding_cost(3, 64) == 1.5
    assert TABLE.padding_cost(np.array([0, 2]), 128).tolist() == [0.0, 2.0]


def test_more_requests_than_measured_go_on_as_the_last() -> None:
    """For the simulator; the runtime does not go there."""
    assert TABLE.verify_cost(8, 0, 64)[0] == 8.0


def _written(folder: Path, table: CostTable) -> Path:
    path = folder / cost.PATH
    path.parent.mkdir()
    path.write_text(table.to_json())
    return folder


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    loaded = load_cost(_written(tmp_path, TABLE), MANIFEST, 2, 4)
    assert dataclasses.asdict(loaded) == dataclasses.asdict(TABLE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"threads": 4}, r"of another threads \(4, here 2\): run `dspark profile`"),
        ({"machine": "a faster one"}, "of another machine .*: run `dspark profile`"),
        ({"engine": "0"}, "of another engine .*: run `dspark profile`"),
        ({"builder": "tensorrt 11"}, "of another builder .*: run `dspark profile`"),
        ({"gpu": "H200"}, "of another gpu .*: run `dspark profile`"),
    ],
)
def test_a_table_of_something_else_is_refused(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    table = dataclasses.replace(TABLE, identity=TABLE.identity | changed)
    with pytest.raises(TableError, match=message):
        load_cost(_written(tmp_path, table), MANIFEST, 2, 4)


def test_more_requests_than_it_reaches_to_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"ends at 4 requests, and 5 may run .*--max-requests 5"):
        load_cost(_written(tmp_path, TABLE), MANIFEST, 2, 5)


def test_a_missing_table_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"there is no cost table .*run `dspark profile`"):
        load_cost(tmp_path, MANIFEST, 2, 4)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "x": 2}'])
def test_a_damaged_table_names_the_command(text: str) -> None:
    with pytest.raises(TableError, match="run `dspark profile`"):
        parse_cost(text)
