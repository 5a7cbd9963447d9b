"""Folders appear whole or not at all, once per key."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from export.errors import PublishError
from export.publish import content_key, link_or_copy, publish, published_key


def writer(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(text)

    return make


def contents(folder: Path) -> str:
    return (folder / "sub" / "file").read_text()


def unchanged(folder: Path) -> None:
    raise AssertionError("nothing was to be made")


def siblings(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.parent.iterdir() if not p.name.endswith(".lock"))


def test_makes_once_per_key(tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    assert publish(folder, "one", writer("1"))
    assert not publish(folder, "one", unchanged)
    assert publish(folder, "two", writer("2"))
    assert (contents(folder), published_key(folder)) == ("2", "two")
    assert siblings(folder) == ["engines"]


def test_the_previous_folder_is_there_while_the_next_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    publish(folder, "one", writer("1"))

    def make(partial: Path) -> None:
        assert contents(folder) == "1"
        writer("2")(partial)

    publish(folder, "two", make)
    assert contents(folder) == "2"


def test_a_failure_leaves_the_previous_folder(tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    publish(folder, "one", writer("1"))

    def fail(partial: Path) -> None:
        writer("half")(partial)
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        publish(folder, "two", fail)
    assert (contents(folder), published_key(folder)) == ("1", "one")
    assert siblings(folder) == ["engines"]


KILLED_WHILE_MAKING = """
import sys, time
from pathlib import Path
from export.publish import publish

def make(partial):
    (partial / "half").write_text("half")
    print("making", flush=True)
    time.sleep(60)

publish(Path(sys.argv[1]), "two", make)
"""


def test_a_killed_build_leaves_no_half_folder(tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    publish(folder, "one", writer("1"))
    command = [sys.executable, "-c", KILLED_WHILE_MAKING, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "making\n"
        process.kill()
    assert (contents(folder), published_key(folder)) == ("1", "one")
    assert publish(folder, "two", writer("2"))
    assert contents(folder) == "2"
    assert siblings(folder) == ["engines"]


def test_a_crash_between_the_two_renames_is_undone(tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    publish(folder, "one", writer("1"))
    folder.rename(tmp_path / ".engines.previous")
    assert not publish(folder, "one", unchanged)
    assert contents(folder) == "1"


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    publish(folder, "one", writer("1"))

    def fill(partial: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(PublishError, match=r"disk is full while writing .*engines \(\d+ MiB free"):
        publish(folder, "two", fill)
    assert contents(folder) == "1"


def test_other_errors_pass_through(tmp_path: Path) -> None:
    def deny(partial: Path) -> None:
        raise PermissionError(errno.EACCES, "denied")

    with pytest.raises(PermissionError):
        publish(tmp_path / "engines", "one", deny)


def test_two_builds_take_turns(tmp_path: Path) -> None:
    """The second waits, then finds its key made."""
    folder = tmp_path / "engines"
    code = "import sys; from pathlib import Path; from export.publish import publish\n"
    code += "publish(Path(sys.argv[1]), 'one', lambda p: sys.exit('made twice'))"

    def make(partial: Path) -> None:
        nonlocal second
        second = subprocess.Popen([sys.executable, "-c", code, str(folder)])
        time.sleep(0.5)
        assert second.poll() is None
        writer("1")(partial)

    second: subprocess.Popen[bytes] | None = None
    publish(folder, "one", make)
    assert second is not None
    assert second.wait(timeout=30) == 0


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("cut short")])
def test_a_damaged_folder_is_made_again(damage: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    publish(folder, "one", writer("whole"))
    (folder / "cost.json").write_text("added later")
    assert not publish(folder, "one", unchanged)
    damage(folder / "sub" / "file")
    assert publish(folder, "one", writer("whole"))
    assert contents(folder) == "whole"


def test_keys_differ_with_their_parts() -> None:
    assert content_key("a", 1) == content_key("a", 1)
    assert len({content_key("a", 1), content_key("a", 2), content_key("a1"), content_key()}) == 4


def test_links_where_it_can(tmp_path: Path) -> None:
    source, link = tmp_path / "source", tmp_path / "link"
    source.write_text("weights")
    link_or_copy(source, link)
    assert os.path.samefile(source, link)


def test_copies_where_it_cannot_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "source").write_text("weights")
    link_or_copy(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "weights"
