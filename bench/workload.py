"""The requests of the load benchmark, which measures them and which `dspark simulate` predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

TEMPERATURES = (0.0, 1.0)


class Item(NamedTuple):
    """One request: the row of a prompt set, its temperature and seed."""

    prompt_set: str
    row: int
    temperature: float
    seed: int


def work_slices(
    sizes: Mapping[str, int], concurrencies: Sequence[int], slices: int, requests: int
) -> Iterator[tuple[int, list[Item]]]:
    """(clients, requests to share among them) of every slice, in the order of the benchmark.

    Every client sends `requests` of them. The prompt sets (name -> rows) take turns, and so do the
    temperatures of each set; the next slice goes on where the last one stopped.
    """
    items = _items(sizes)
    for _ in range(slices):
        for concurrency in concurrencies:
            yield concurrency, [next(items) for _ in range(concurrency * requests)]


def _items(sizes: Mapping[str, int]) -> Iterator[Item]:
    seed = 0
    while True:
        for row in range(max(sizes.values())):
            for name, size in sizes.items():
                seed += 1
                yield Item(name, row % size, TEMPERATURES[row % len(TEMPERATURES)], seed)
