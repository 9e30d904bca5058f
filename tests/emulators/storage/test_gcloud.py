"""`gcloud storage`, which uses the same API in another form (bare LF in multipart bodies, another upload root)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ...gcloud import RunGcloud
from .conftest import Running

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")]


class Gcloud:
    """Runs gcloud against the emulator, without an account."""

    def __init__(self, run: RunGcloud, url: str, config: Path) -> None:
        self._run = run
        self._environment = {
            **os.environ,
            "CLOUDSDK_CONFIG": str(config),
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{url}/",
            "CLOUDSDK_CORE_PROJECT": "local-project",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_STORAGE_PROCESS_COUNT": "1",
        }

    def __call__(self, *arguments: str) -> str:
        done = self._run(["storage", *arguments], self._environment)
        assert done.returncode == 0, f"{arguments}: {done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture
def gcloud(running: Running, tmp_path: Path, run_gcloud: RunGcloud) -> Gcloud:
    return Gcloud(run_gcloud, running.api.url, tmp_path / "gcloud")


@pytest.mark.timeout(1200)
def test_copy_list_read_remove(running: Running, gcloud: Gcloud, tmp_path: Path) -> None:
    bucket = running.api.bucket()
    spec = tmp_path / "job.json"
    spec.write_bytes(b'{"name": "x"}\r\nand more\n')
    gcloud("cp", str(spec), f"gs://{bucket}/specs/job.json")
    stored = running.api.object("GET", bucket, "specs/job.json").json()
    assert (stored["contentType"], stored["size"]) == ("application/json", "24")
    assert gcloud("ls", f"gs://{bucket}/specs/").split() == [f"gs://{bucket}/specs/job.json"]
    assert gcloud("cat", f"gs://{bucket}/specs/job.json") == '{"name": "x"}\r\nand more\n'.replace("\r\n", "\n")
    gcloud("cp", f"gs://{bucket}/specs/job.json", str(tmp_path / "down.json"))
    assert (tmp_path / "down.json").read_bytes() == spec.read_bytes()
    gcloud("rm", f"gs://{bucket}/specs/job.json")
    assert running.api.object("GET", bucket, "specs/job.json").status_code == 404


@pytest.mark.timeout(1200)
def test_resumable_copy_up_and_down(running: Running, gcloud: Gcloud, tmp_path: Path) -> None:
    bucket, data = running.api.bucket(), os.urandom(20 * 2**20 + 3)
    (tmp_path / "big").write_bytes(data)
    gcloud("cp", str(tmp_path / "big"), f"gs://{bucket}/big")
    assert running.api.object("GET", bucket, "big", params={"alt": "media"}).content == data
    gcloud("cp", f"gs://{bucket}/big", str(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == data


@pytest.mark.timeout(1200)
def test_buckets_and_trees(running: Running, gcloud: Gcloud, tmp_path: Path) -> None:
    gcloud("buckets", "create", "gs://made-by-gcloud", "--location=europe-west4")
    described = json.loads(gcloud("buckets", "describe", "gs://made-by-gcloud", "--format=json"))
    assert described["location"] == "EUROPE-WEST4"
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "a").write_text("a")
    (tree / "sub" / "b").write_text("b")
    gcloud("cp", "-r", str(tree), "gs://made-by-gcloud/")
    gcloud("mv", "gs://made-by-gcloud/tree/a", "gs://made-by-gcloud/tree/moved")
    listed = gcloud("ls", "-r", "gs://made-by-gcloud/**").split()
    assert listed == ["gs://made-by-gcloud/tree/moved", "gs://made-by-gcloud/tree/sub/b"]
    gcloud("rm", "-r", "gs://made-by-gcloud")
    assert running.api.call("GET", "b/made-by-gcloud").status_code == 404
