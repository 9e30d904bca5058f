"""The Dockerfiles: each line that matters is held to facts, and a change of any of them is noticed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
from tools import lock

from dropforge_local.containers.dockerfile import parse
from dropforge_local.containers.images import ImageStore

from .dockerfiles import BASES, CONTAINERS, FACTS, ROOT, problems

ROLES = sorted(path.parent.name for path in CONTAINERS.glob("*/Dockerfile"))
OF_PYTORCH = {lock.path.removeprefix("containers/"): lock.index for lock in lock.LOCKS if lock.index}


def pins(name: str) -> dict[str, str]:
    return lock.pins((CONTAINERS / name).read_text())


def test_every_image_has_facts_and_a_base() -> None:
    assert ROLES == sorted(FACTS) == sorted(BASES)
    for role, base in BASES.items():
        assert base.keys() == {"image", "digest", "source", "seen"}, role
        assert re.fullmatch(r"docker\.io/[\w./-]+:[\w.-]+", base["image"])
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", base["digest"])
        assert isinstance(base["seen"], date)


@pytest.mark.parametrize("role", ROLES)
def test_the_dockerfile_is_what_the_facts_say(role: str) -> None:
    assert problems(role, CONTAINERS / role / "Dockerfile") == []


def mutations(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text without one instruction, and with one word of an instruction changed."""
    lines = text.splitlines(keepends=True)
    numbers = [instruction.line for instruction in parse(text)] + [len(lines) + 1]
    for start, end in pairwise(numbers):
        instruction = lines[start - 1 : end - 1]
        yield f"without {instruction[0].strip()}", "".join(lines[: start - 1] + lines[end - 1 :])
    changes = [
        (r"(@sha256:)\w", r"\1x"),
        (r"\bUSER .*", "USER root"),
        (r"USER 0\b", "USER 10001"),
        (r"--uid 10001", "--uid 10002"),
        (r" --require-hashes", ""),
        (r" --no-deps", ""),
        (r" --no-build\b", ""),
        (r" --no-build-isolation", ""),
        (r"PYTHONPATH=/opt/uv ", ""),
        (r"--index-url", "--extra-index-url"),
        (r"(--requirement \w+)\.lock", r"\1"),
        (r" --requirement \w+\.lock\.txt", ""),
        (r"(uv pip install )", r"\1torch "),
        (r"(--python) /opt/(\w+) --no", r"\1 /opt/other --no"),
        (r"whl/\w+", "whl/cu130"),
        (r"(COPY \S+/)(\w+)( /app)", r"\1__init__.py\3"),
        (r"(COPY .*) (/app/\S+)", r"\1 /src"),
        (r"(ARG \w+=containers/)\S+", r"\1nothing.lock.txt"),
        (r"rm -rf /opt/uv", "true"),
        (r"(ENTRYPOINT .*)train", r"\1test"),
        (r"(PYTHONPATH=/app)\b", r"\1/src"),
        (r"&& uv venv --python \S+ \S+", "&& true"),
        (r"(dev\.dropforge\.environments=\"/opt/\w+)", r"\1x"),
        (r"install --yes --no-install-recommends (\w+)", "install --yes --no-install-recommends"),
    ]
    for pattern, replacement in changes:
        for match in re.finditer(pattern, re.sub(r"(?m)^#.*$", lambda comment: " " * len(comment[0]), text)):
            changed = text[: match.start()] + match.expand(replacement) + text[match.end() :]
            if changed != text:
                yield f"{match[0]!r} is {match.expand(replacement)!r}", changed


@pytest.mark.parametrize("role", ROLES)
def test_a_change_of_any_line_that_matters_is_noticed(role: str, tmp_path: Path) -> None:
    dockerfile, unnoticed, count = tmp_path / "Dockerfile", [], 0
    for change, text in mutations((CONTAINERS / role / "Dockerfile").read_text()):
        dockerfile.write_text(text)
        count += 1
        if not problems(role, dockerfile):
            unnoticed.append(change)
    assert unnoticed == []
    assert count > 20


@pytest.mark.parametrize("role", ROLES)
def test_packages_of_pytorch_come_from_its_own_index_and_all_others_from_pypi(role: str) -> None:
    for install in FACTS[role]["installs"]:
        assert {OF_PYTORCH.get(name, "") for name in install["locks"]} == {install["index"]}, install
        names = [name for path in install["locks"] for name in pins(path)]
        assert len(names) == len(set(names)), f"a package is in two locks of {install}"
        assert "torch" not in names or install["index"]


def test_cuda_is_that_of_the_pytorch_that_trains() -> None:
    (version,) = pins("train_trl/torch.lock.txt").values()
    cuda = re.fullmatch(r"2\.13\.0\+cu(\d\d)(\d)", version)
    assert cuda is not None
    libraries = pins("train_trl/cuda.lock.txt")
    assert libraries["cuda-toolkit"].startswith(f"{cuda[1]}.{cuda[2]}.")
    of_nvidia = [name for name in libraries if name.startswith("nvidia-")]
    assert len(of_nvidia) == 15
    assert [name for name in of_nvidia if not name.endswith(f"-cu{cuda[1]}")] == []


def test_no_other_lock_brings_cuda() -> None:
    for path in CONTAINERS.rglob("*.lock.txt"):
        if path.parent.name != "train_trl":
            names = [name for name in lock.pins(path.read_text()) if name.startswith(("nvidia", "cuda", "triton"))]
            assert names == [], path


def test_training_and_checks_use_the_versions_that_the_project_tests() -> None:
    tested = lock.pins((ROOT / "lock.txt").read_text())
    folders = ("console/requirements", "train_trl/requirements", "train_maxtext/check", "serve_vllm/requirements")
    for name in (f"{folder}.lock.txt" for folder in folders):
        locked = pins(name)
        assert {
            package: version for package, version in locked.items() if tested.get(package, version) != version
        } == {}
    for name in ("torch_cpu.lock.txt", "train_trl/torch.lock.txt"):
        assert pins(name)["torch"].split("+")[0] == tested["torch"]


def test_both_vllm_images_have_a_pinned_vllm() -> None:
    tpu = pins("serve_vllm_tpu/requirements.lock.txt")
    assert (tpu["vllm-tpu"], tpu["tpu-inference"]) == ("0.32.0", "0.32.0")
    image = BASES["serve_vllm"]["image"].split(":v")[1].split("-")[0]
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    assert extra == [f"vllm[runai]=={image}"]


@pytest.mark.parametrize("role", ["console", "train_trl", "serve_vllm", "serve_vllm_tpu"])
def test_the_image_is_complete_and_its_entrypoint_names_what_is_missing(role: str, tmp_path: Path) -> None:
    image = ImageStore(ROOT, tmp_path / "images", Path(sys.executable)).resolve(role.replace("_", "-"))
    process = image.unpack(tmp_path / "rootfs")
    environment = {**process.env, "PATH": os.environ["PATH"]}
    result = subprocess.run(
        process.argv, env=environment, cwd=process.workdir, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 64, result.stderr
    assert "DROPFORGE_" in result.stderr
