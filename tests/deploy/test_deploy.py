"""What can be checked of the container without building it: every path, name and command in it."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from triton_repo.server import Address

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTRUCTIONS = re.findall(
    r"^([A-Z]+) (.+)$", re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M)), re.M
)


def of(instruction: str) -> list[str]:
    return [text for name, text in INSTRUCTIONS if name == instruction]


def test_every_copied_path_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [source for text in of("COPY") for source in text.split()[:-1]]
    assert len(sources) > 10
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] not in ignored


def test_every_package_is_copied() -> None:
    copied = {text.split()[0] for text in of("COPY")}
    assert copied >= set(PROJECT["tool"]["setuptools"]["packages"])
    assert PROJECT["project"]["readme"] in DOCKERFILE


def test_versions_are_pinned_and_agree() -> None:
    assert re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3", of("FROM")[0])
    (requirement,) = PROJECT["project"]["optional-dependencies"]["tensorrt"]
    version = re.fullmatch(r"tensorrt-cu13==(\d+(?:\.\d+){3})(?:\.post\d+)?", requirement)
    assert version
    assert f"TensorRT {version[1]}" in DOCKERFILE


def test_python_of_the_container_fits_the_project() -> None:
    (python,) = set(re.findall(r"python(3\.\d+)", DOCKERFILE))
    assert f"DSPARK_SITE_PACKAGES=/opt/dspark/.venv/lib/python{python}/site-packages" in DOCKERFILE
    low, high = re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"])
    assert int(low) <= int(python.split(".")[1]) < int(high)


def test_ports_are_the_servers() -> None:
    ports = sorted(Address().ports.values())
    assert of("EXPOSE") == [" ".join(map(str, ports))]
    assert COMPOSE["services"]["dspark"]["ports"] == [f"127.0.0.1:{p}:{p}" for p in ports]


def test_compose_names_what_exists() -> None:
    service = COMPOSE["services"]["dspark"]
    build = service["build"]
    context = (ROOT / "deploy" / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    (volume,) = service["volumes"]
    name, place = volume.split(":")
    assert name in COMPOSE["volumes"]
    assert place == f"{of('WORKDIR')[0]}/build"
    script = (ROOT / "deploy" / "serve.sh").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for variable in service["environment"]:
        assert variable in script
    for variable in re.findall(r"(\w+)=\$?[{\w]", re.search(r"^export (.+)$", script, re.M)[1]):  # type: ignore[index]
        assert re.search(rf"^{variable} \?=", makefile, re.M), variable


def test_the_health_check_asks_a_path_that_the_server_has() -> None:
    assert f"localhost:{Address().ports['http']}/v2/health/ready" in of("HEALTHCHECK")[0]


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """`make` and `tritonserver` that say how they were called."""
    for name in ("make", "tritonserver"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $*|$NAME|$DTYPE|$TARGET|$SERVING|$PWD"\n')
        program.chmod(0o755)
    return tmp_path


def serve(bin_dir: Path, *arguments: str, **environment: str) -> list[str]:
    (entrypoint,) = yaml.safe_load(of("ENTRYPOINT")[0])
    run = subprocess.run(
        [ROOT / entrypoint, *arguments],
        env={"PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return run.stdout.splitlines()


def test_the_entrypoint_builds_and_serves(bin_dir: Path) -> None:
    assert serve(bin_dir) == [
        f"make engines|smollm2|fp16|tensorrt||{ROOT}",
        f"tritonserver --model-repository build/smollm2/repository|smollm2|fp16|tensorrt||{ROOT}",
    ]


def test_the_entrypoint_passes_on_what_it_is_told(bin_dir: Path) -> None:
    lines = serve(bin_dir, "--log-verbose=1", NAME="qwen", DTYPE="bf16", DSPARK_CONFIG="/c.json")
    assert lines[0] == f"make engines|qwen|bf16|tensorrt|/c.json|{ROOT}"
    assert lines[1].startswith("tritonserver --model-repository build/qwen/repository --log-v")


def test_the_makefile_hands_the_variables_on() -> None:
    """What the entrypoint exports reaches the commands; -n runs none of them."""
    variables = {"NAME": "qwen", "DTYPE": "bf16", "TARGET": "tensorrt", "SERVING": "/c.json"}
    run = subprocess.run(
        ["make", "-n", "engines", "COMPUTE_CAPABILITY=SM86"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    said = re.sub(r"\\\n\s*", "", run.stdout)
    assert "dspark export --name qwen --dtype bf16" in said
    wanted = "dspark build --name qwen --target tensorrt --config /c.json --compute-capability SM86"
    assert wanted in said
    assert "dspark package --name qwen" in said
