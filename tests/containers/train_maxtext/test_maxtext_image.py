"""The MaxText image: its packages are pinned by version alone, its COPYs are complete, its ENTRYPOINT starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools import lock

from dropforge_local.containers.images import ImageStore

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "containers" / "train_maxtext"


def test_every_package_is_pinned_and_none_is_for_gpus() -> None:
    locked = lock.pins((ROLE / "requirements.lock.txt").read_text())
    assert locked["maxtext"] == "0.2.5"
    assert {"jax", "google-tunix", "orbax-checkpoint", "google-cloud-storage", "google-cloud-pubsub"} <= locked.keys()
    assert [name for name in locked if name.startswith(("nvidia", "torch", "triton", "cuda"))] == []


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("maxtext_environment")
def test_the_image_is_complete_and_its_entrypoint_names_what_is_missing(tmp_path: Path) -> None:
    store = ImageStore(ROOT, tmp_path / "images", Path(sys.executable))
    process = store.resolve("train-maxtext").unpack(tmp_path / "rootfs")
    environment = {**process.env, "PATH": os.environ["PATH"]}
    result = subprocess.run(
        process.argv, env=environment, cwd=process.workdir, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 64, result.stderr
    assert "DROPFORGE_RUN is not set" in result.stderr
    version = subprocess.run([process.argv[0], "-V"], capture_output=True, text=True).stdout
    assert version.startswith("Python 3.12")
    torch_python = process.env["DROPFORGE_TORCH_PYTHON"]
    assert subprocess.run([torch_python, "-c", "import torch"], env=environment).returncode == 0


def test_without_python_3_12_the_environment_is_not_made_and_that_is_said(tmp_path: Path) -> None:
    if sys.version_info[:2] == (3, 12):
        pytest.skip("this is Python 3.12")
    environment = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-P", str(ROOT / "tools" / "maxtext_env.py"), str(tmp_path / "maxtext")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 3
    assert "no python3.12 in PATH" in result.stderr
    assert not (tmp_path / "maxtext").exists()
