"""The `dspark` command itself."""

from __future__ import annotations

import os
import sys

import pytest

from cli import main as cli


def test_starts_itself_again_with_huge_pages_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executed: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["dspark", "--help"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "cli.main", "--help"])
    monkeypatch.setattr(os, "execv", lambda program, argv: executed.append([program, *argv]))
    monkeypatch.delenv(cli.TUNABLES, raising=False)
    for _ in range(2):  # the second is what the first started
        with pytest.raises(SystemExit):
            cli.main()
        assert os.environ[cli.TUNABLES] == cli.HUGE_PAGES
    assert executed == [[sys.executable, sys.executable, "-m", "cli.main", "--help"]]
    assert "COMMAND" in capsys.readouterr().out
