"""The libraries of MaxText's checkpoints get the run's token, also when `access` fails for the moment."""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from ..common.front import front_of
from ..names import PROJECT, ROOT, RUNS

pytestmark = pytest.mark.slow

# TensorStore gives up at the first answer 503 of a metadata server (measured with 0.1.84).
WRITE_AND_READ = """
import sys
from containers.train_ray.bucket_tokens import lend
from dropforge.cloud.clients import Clients
lend(Clients())
import fsspec, tensorstore
bucket = tensorstore.KvStore.open(sys.argv[1]).result()
bucket.write("d/part", b"weights").result()
print(bucket.read("d/part").result().value.decode())
print(fsspec.filesystem("gcs").cat(sys.argv[1] + "d/part").decode())
"""


@pytest.mark.parametrize("of", ["identity", "access"])
def test_tensorstore_and_gcsfs_wait_for_the_token(cloud: Any, maxtext_environment: Path, of: str) -> None:
    with front_of(cloud.server.url) as front:
        front.first(of, 503, 429)
        environment = {**front.environment(RUNS), "DROPFORGE_PROJECT": PROJECT, "PATH": "/usr/bin:/bin"}
        environment["TENSORSTORE_GCS_HTTP_URL"] = environment["STORAGE_EMULATOR_HOST"]
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'functions'}"
        command = [str(maxtext_environment / "bin" / "python"), "-P", "-c", WRITE_AND_READ]
        uri = f"gs://{RUNS}/checkpoints/r-{uuid.uuid4().hex[:12]}/"
        done = subprocess.run([*command, uri], env=environment, capture_output=True, text=True)
        assert done.stdout == "weights\nweights\n", done.stderr
        assert len(front.met) == 2
