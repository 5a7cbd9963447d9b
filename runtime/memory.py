"""How much memory is free, for caches that take what they can get."""

from __future__ import annotations

from pathlib import Path

# (limit, usage, statistics, name of the reclaimable part) of cgroup versions 2 and 1
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_bytes(on_cpu: bool) -> int:
    """Bytes that can still be taken where the engines' KV pools lie: in host or in GPU memory.

    Host memory is what the kernel calls available, or less where this container's limit is less.
    """
    if on_cpu:
        return host_free_bytes(Path("/"))
    import torch

    return int(torch.cuda.mem_get_info()[0])


def host_free_bytes(root: Path) -> int:
    """Free bytes by `root`/proc/meminfo and `root`/sys/fs/cgroup."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    free = int(fields["MemAvailable"].split()[0]) << 10
    for limit, usage, statistics, reclaimable in _CGROUPS:
        try:
            most = (root / "sys/fs/cgroup" / limit).read_text().strip()
            used = int((root / "sys/fs/cgroup" / usage).read_text())
            lines = (root / "sys/fs/cgroup" / statistics).read_text().splitlines()
        except OSError:
            continue
        if most != "max":
            used -= int(dict(line.split() for line in lines).get(reclaimable, 0))
            free = min(free, int(most) - used)
    return max(0, free)
