"""The images: pinned to the versions of lock.txt, complete by their own COPYs, started by their own ENTRYPOINT."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dropforge_local.containers.images import ImageStore

ROOT = Path(__file__).resolve().parents[2]
ROLES = ["train_trl", "serve_vllm"]
TPU = ROOT / "containers" / "serve_vllm_tpu"
ELSEWHERE = {"vllm[runai]"}  # not in lock.txt: it pins another torch


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.\[\]-]+)==(\S+)", path.read_text(), re.M))


@pytest.mark.parametrize("role", ROLES)
def test_requirements_are_pinned_as_in_the_lock(role: str) -> None:
    locked = {name.lower(): version for name, version in pins(ROOT / "lock.txt").items()}
    for name, version in pins(ROOT / "containers" / role / "requirements.txt").items():
        if name not in ELSEWHERE:
            assert locked[name.lower()] == version, name


def test_vllm_for_tpus_is_pinned_and_brings_no_cuda() -> None:
    text = (TPU / "requirements.lock.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pinned = re.compile(r"[\w.-]+==[\w.]+(\+cpu)?")
    assert [line for line in lines if not pinned.fullmatch(line)] == []  # no URL, path or option
    locked = dict(line.split("==") for line in lines)
    assert (locked["vllm-tpu"], locked["tpu-inference"], locked["torch"][-4:]) == ("0.32.0", "0.32.0", "+cpu")
    assert [name for name in locked if name.startswith(("nvidia", "cuda", "triton"))] == []
    ours = pins(ROOT / "lock.txt")
    assert {name: locked[name] for name in ("google-cloud-storage", "pydantic")}.items() <= ours.items()


@pytest.mark.parametrize("role", [*ROLES, "serve_vllm_tpu"])
def test_the_image_is_complete_and_its_entrypoint_names_what_is_missing(role: str, tmp_path: Path) -> None:
    image = ImageStore(ROOT, tmp_path / "images", Path(sys.executable)).resolve(role.replace("_", "-"))
    process = image.unpack(tmp_path / "rootfs")
    environment = {**process.env, "PATH": os.environ["PATH"]}
    result = subprocess.run(
        process.argv, env=environment, cwd=process.workdir, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 64, result.stderr
    assert "DROPFORGE_" in result.stderr


@pytest.mark.parametrize("role", ROLES)
def test_the_image_does_not_run_as_root(role: str) -> None:
    text = (ROOT / "containers" / role / "Dockerfile").read_text()
    user = re.search(r"^USER (\w+)$", text, re.M)
    assert user is not None
    assert user[1] != "root"
    assert text.rstrip().splitlines()[-1].startswith("ENTRYPOINT [")
