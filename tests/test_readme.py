"""The README and the tree say the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_file_named_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|md|toml))`", README))
    assert len(named) > 20
    missing = sorted(name for name in named if not (ROOT / name).is_file())
    assert not missing


def test_every_folder_is_in_the_tree() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = {name.split("/")[0] for name in tracked if "/" in name and not name.startswith(".")}
    tree = set(re.findall(r"^(\w+)/ ", README, re.M))
    assert tree == folders | {"models"}


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`dspark ([\w-]+)", README))))
def test_every_command_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"make ([a-z]+)\b", README))
    assert {"serve", "test", "engines"} <= named <= targets
