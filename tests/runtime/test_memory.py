"""Free memory, as the kernel and the container's limit tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.memory import free_bytes, host_free_bytes

GIB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemAvailable:  8388608 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 16 kB\nMemAvailable:  8388608 kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "sys/fs/cgroup/memory/memory."


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 * GIB),
        (
            {
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "5\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 3\n",
            },
            8 * GIB,
        ),
        (
            {
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                f"{V1}limit_in_bytes": f"{2 * GIB}\n",
                f"{V1}usage_in_bytes": f"{3 * GIB}\n",
                f"{V1}stat": "total_inactive_file 0\n",
            },
            0,
        ),
        (
            {
                f"{V1}limit_in_bytes": "9223372036854771712\n",  # how version 1 says no limit
                f"{V1}usage_in_bytes": f"{3 * GIB}\n",
                f"{V1}stat": "total_inactive_file 0\n",
            },
            8 * GIB,
        ),
    ],
)
def test_the_containers_limit_counts(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert host_free_bytes(machine(tmp_path, files)) == free


def test_this_machine_has_some() -> None:
    assert free_bytes(on_cpu=True) > 0


def test_engines_on_a_gpu_count_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (3 * GIB, 8 * GIB))
    assert free_bytes(on_cpu=False) == 3 * GIB
