"""The local stack's reading of each Dockerfile, held to what an image really is.

Committed facts (tests/data/images.toml) stand for the images where none was built here. `make images-local` leaves what
it saw of each image in build/images-local.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools import images_local

from dropforge_local.containers.dockerfile import evaluate

from .dockerfiles import FACTS, ROOT, expected_files

OWN = "io.buildah."  # labels that buildah adds


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_images_are_really_built_and_their_entry_points_start_as_their_users() -> None:
    """The image that trains a model, and the smallest; `make images-local` builds all of them."""
    if missing := images_local.missing_here():
        pytest.skip(missing)
    command = [sys.executable, "-P", str(ROOT / "tools" / "images_local.py"), "--no-compile", "train_trl", "serve_vllm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"train_trl +yes.*UID 10001: 30 steps, .*MANIFEST.*", table[0])
    assert re.fullmatch(r"serve_vllm +yes.*UID 10001: exit 64, .*becomes the base's vllm", table[1])


def test_the_images_that_were_built_are_what_the_local_stack_reads() -> None:
    built = {role: images_local.WORK / f"{role}.json" for role in images_local.STARTS}
    images = {role: json.loads(path.read_text()) for role, path in built.items() if path.exists()}
    current = {role: image for role, image in images.items() if image["context"] == images_local.context_digest()}
    if not current:
        pytest.skip("no image was built here from these files; run `make images-local`")
    for role, image in current.items():
        compare(role, image)


def compare(role: str, image: dict[str, Any]) -> None:
    stage, config = evaluate(ROOT / "containers" / role / "Dockerfile", ROOT), image["config"]
    base = dict(line.split("=", 1) for line in config["Env"])
    assert base | stage.env == base
    assert base.keys() - stage.env.keys() <= {"PATH"}  # the base's
    labels = {name: value for name, value in config["Labels"].items() if not name.startswith(OWN)}
    assert (labels, config["User"], config["WorkingDir"]) == (stage.labels, stage.user, stage.workdir)
    assert (config["Entrypoint"], config["Cmd"] or []) == ([*stage.entrypoint], [*stage.cmd])
    assert image["files"] == digests({place: file for place, file in stage.files.items() if place.startswith("/app/")})


@pytest.mark.parametrize("role", images_local.STARTS)
def test_the_facts_of_the_image_are_what_the_local_stack_reads(role: str) -> None:
    stage, facts = evaluate(ROOT / "containers" / role / "Dockerfile", ROOT), FACTS[role]
    assert (stage.env, stage.labels, stage.user, stage.workdir) == tuple(
        facts[name] for name in ("env", "labels", "user", "workdir")
    )
    assert [*stage.entrypoint] == facts["entrypoint"]
    files = {place: file for place, file in stage.files.items() if place.startswith("/app/")}
    assert digests(files) == digests(expected_files(role))


def digests(files: dict[str, Path]) -> dict[str, str]:
    return {place: hashlib.sha256(file.read_bytes()).hexdigest() for place, file in files.items()}


def test_without_buildah_no_image_is_built_and_that_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(ROOT / "tools" / "images_local.py")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "No image was built: buildah is not installed (Debian's package buildah)\n"


def test_an_unknown_role_is_refused() -> None:
    command = [sys.executable, "-P", str(ROOT / "tools" / "images_local.py"), "train_nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no containers/train_nothing; expected console, train_trl, " in done.stderr
