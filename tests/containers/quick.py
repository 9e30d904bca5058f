"""Quick starts of MaxText, Ray and vLLM: a process that has imported them forks programs (zygote/zygote.py)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .names import ROOT
from .zygote.sitecustomize import SOCKET

DIRECTORY = Path(__file__).parent / "zygote"
IMPORTS = ROOT / "containers" / "train_maxtext" / "imports.py"
TRAIN = "maxtext.trainers.post_train.sft.train_sft"
# MaxText's stages, Ray's programs and Ray's workers import these modules. Ray itself is not among them: at its import,
# Ray reads the variables of its process, such as the job of a worker.
MAXTEXT = (
    *("aiohttp_cors", "click", "colorful", "fastapi", "grpc.aio", "jsonschema", "pandas", "prometheus_client"),
    *("opencensus.stats", "opentelemetry.exporter.prometheus", "opentelemetry.sdk.trace.export", "pyarrow.dataset"),
    *("pydantic", "requests", "uvicorn", "uvloop", "yaml", "google.cloud.storage", "jax", TRAIN),
    *("jax.experimental.multihost_utils", "transformers.models.auto.tokenization_auto"),
)
# The server imports the first; the engine, which it forks, the second.
VLLM = ("vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_model_runner")


class Zygote:
    """A process that imports `modules`, and then forks the programs of processes that it has given their environment.

    Modules read `environment` while they are imported. `path` is its socket's, and has at most 107 bytes.
    """

    def __init__(self, python: Path, path: Path, environment: Mapping[str, str], modules: tuple[str, ...]) -> None:
        self.path = path
        command = [str(python), "-P", str(DIRECTORY / "zygote.py"), str(path), str(IMPORTS), *modules]
        # Arrow's allocator would start a thread.
        own = {**environment, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        self._process = subprocess.Popen(
            command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._is_ready = False
        self.pid = self._process.pid

    def given(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`environment` for a process whose programs are forked; waits until the zygote is ready."""
        if not self._is_ready:
            assert self._process.stdout is not None
            assert b"ready\n" in self._process.stdout  # MaxText's modules print lines, too
            self._is_ready = True
        path = os.pathsep.join([str(DIRECTORY), *filter(None, [environment.get("PYTHONPATH")])])
        return {**environment, "PYTHONPATH": path, SOCKET: str(self.path)}

    def end(self) -> None:
        self._process.communicate()
