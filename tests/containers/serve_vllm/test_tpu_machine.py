"""XLA's programs on a TPU VM: a restart finds them on the machine's disk, and a new machine in the bucket.

The serving container is real. A program stands for `vllm`, because the real one has no chips here
(tests/images/containers/serve_chips).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_SECONDS

from bench import cold_start
from containers.serve_vllm.compiled import PROGRAMS, Kept, fetch, keep
from dropforge.run.starts import PARTS, read_start
from dropforge_local.base.ports import free_port

from ..conftest import RUNS
from .test_compiled import ROOT, files_below, metadata_server, zipped

COMPILED, FOUND = (
    [f"{word} jit_{name}-cache\n" for name in ("step-0a", "sample-0b")] for word in ("compiled", "found")
)
READY, KEPT, GOT = cold_start.READY, cold_start.KEPT, "got the compiled code of an earlier start"
OWN, UNUSED = "uses the compiled code on the disk of this machine", "the compiled code of an earlier start is not used"
JAX = """
import json, sys
import jax

counts = {"cache_hits": 0, "cache_misses": 0}

def count(event, **_):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1

jax.monitoring.register_event_listener(count)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((8, 8))).block_until_ready()
print(json.dumps(counts))
"""
IMAGE = ROOT / "tests" / "images" / "containers" / "serve_chips"
CONFIG = '{"model_type": "qwen3"}'
CHIPS = "serve.has_tpu = lambda: True"  # a TPU VM has devices in /dev


@dataclass
class Server:
    """The server of a run on TPU VMs, which are all at the same path: an empty disk is another machine."""

    cloud: Any
    run: str
    home: Path
    metadata: str
    port: int = field(default_factory=lambda: free_port(range(20_000, 24_000), set()))

    @property
    def work(self) -> Path:
        return self.home / "work"

    def start(self, last: str, setup: str = "") -> str:
        """Start the container, end it with its entry `last` in the log; its output."""
        code = f"from containers.serve_vllm import compiled, serve; {CHIPS}; {setup}\nraise SystemExit(serve.main())"
        output = ""
        with subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                output += line
                if f'"message": "{last}"' in line:
                    break
            process.kill()
        assert f'"message": "{last}"' in output, output
        return output

    def environment(self) -> dict[str, str]:
        return {
            **self.cloud.environment(),
            "PATH": f"{IMAGE}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
            "GCE_METADATA_HOST": self.metadata,
            "DROPFORGE_MODEL_URI": f"gs://{RUNS}/models/{self.run}",
            "DROPFORGE_SERVED_MODEL_NAME": "m",
            "DROPFORGE_WORK_DIRECTORY": str(self.work),
            "DROPFORGE_COMPILE_CACHE": str(self.work),
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
        }

    def replace_machine(self) -> None:
        shutil.rmtree(self.work)

    def programs(self) -> dict[str, bytes]:
        return files_below(self.work / "compiled")

    def archives(self) -> list[Any]:
        return list(self.cloud.client.list_blobs(RUNS, prefix=f"caches/{self.run}/"))


@pytest.fixture(scope="module")
def tpu_type() -> Iterator[str]:
    """The address of the metadata server of a v5litepod-8."""
    with metadata_server({"instance": {"attributes": {"accelerator-type": "v5litepod-8"}}}) as address:
        yield address


@pytest.fixture
def server(cloud: Any, tpu_type: str, tmp_path: Path) -> Server:
    run, model = f"chips-{uuid.uuid4().hex[:12]}", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(CONFIG)
    cold_start.commit(cloud.client, RUNS, run, model)
    return Server(cloud, run, tmp_path, tpu_type)


def compilations(output: str) -> list[str]:
    return [line for line in output.splitlines(keepends=True) if line.startswith(("compiled ", "found "))]


def test_a_new_machine_compiles_nothing_and_a_restart_downloads_nothing(server: Server) -> None:
    assert compilations(server.start(KEPT)) == COMPILED
    assert list(read_start(server.cloud.client, RUNS, server.run)) == [part for part in PARTS if part != "adapters"]
    (archive,), programs = server.archives(), server.programs()
    assert programs.keys() == {"xla/jit_step-0a-cache", "xla/jit_sample-0b-cache"}
    server.replace_machine()
    output = server.start(READY)
    assert compilations(output) == FOUND
    assert GOT in output
    assert server.programs() == programs

    own = server.work / "compiled" / "xla" / "jit_late-0c-cache"
    own.write_bytes(b"of a request with a new shape")
    output = server.start(READY)
    assert compilations(output) == FOUND
    assert OWN in output
    assert GOT not in output
    assert server.programs() == {**programs, "xla/jit_late-0c-cache": b"of a request with a new shape"}
    assert [blob.generation for blob in server.archives()] == [archive.generation]


def test_a_machine_whose_server_ended_early_keeps_its_programs_at_the_next_start(server: Server) -> None:
    server.start(KEPT)
    for archive in server.archives():
        archive.delete()
    output = server.start(KEPT)
    assert OWN in output
    assert compilations(output) == FOUND
    assert len(server.archives()) == 1


HOSTILE: list[tuple[dict[str, bytes], str, str]] = [
    ({"xla/jit_step-0a-cache": b"x", "xla/../../model/config.json": b"{}"}, "", "expected a path below xla"),
    ({"xla/jit_step-0a-cache": b"x", "triton/kernel": b"x"}, "", "expected a path below xla"),
    ({"xla/jit_step-0a-cache": bytes(9)}, "most_bytes=8", "more than 8 bytes"),
]


def test_a_hostile_archive_changes_nothing_and_stops_no_start(server: Server) -> None:
    server.start(KEPT)
    (blob,) = server.archives()
    for archive, limit, why in HOSTILE:
        blob.upload_from_string(zipped(archive).getvalue())
        server.replace_machine()
        setup = f"from dataclasses import replace; compiled.PROGRAMS = replace(compiled.PROGRAMS, {limit})"
        output = server.start(READY, setup)
        assert UNUSED in output
        assert why in output
        assert compilations(output) == COMPILED
        assert server.programs().keys() == {"xla/jit_step-0a-cache", "xla/jit_sample-0b-cache"}
        assert (server.work / "model" / "config.json").read_text() == CONFIG
        assert {path.name for path in server.work.iterdir()} == {"compiled", "model"}
        assert [found.generation for found in server.archives()] == [blob.generation]


@pytest.mark.slow
def test_jax_finds_the_programs_of_an_archive_in_another_directory(
    cloud: Any, maxtext_environment: Path, tmp_path: Path
) -> None:
    """On the CPU; JAX's cache of programs is the same code on a TPU."""

    def run(kept: Kept) -> dict[str, int]:
        python, programs = str(maxtext_environment / "bin" / "python"), str(kept.directory / "xla")
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        output = subprocess.check_output([python, "-c", JAX, programs], env=environment, timeout=PATIENCE_SECONDS)
        counts: dict[str, int] = json.loads(output)
        return counts

    kept = Kept(RUNS, f"caches/chips-{uuid.uuid4().hex[:12]}/x.zip", tmp_path / "first" / "compiled", PROGRAMS)
    new = replace(kept, directory=tmp_path / "second" / "compiled")
    first = run(kept)
    assert first["cache_misses"] > first["cache_hits"] == 0
    assert keep(cloud.client, kept)
    assert fetch(cloud.client, new)
    assert run(new) == {"cache_hits": first["cache_misses"], "cache_misses": 0}


def test_without_a_metadata_server_nothing_is_kept_and_a_restart_finds_its_programs(server: Server) -> None:
    server.metadata = f"127.0.0.1:{free_port(range(20_000, 24_000), set())}"
    output = server.start(READY)
    assert "compiled code is not kept: the metadata server does not tell the type of the TPU" in output
    assert compilations(output) == COMPILED
    assert compilations(server.start(READY)) == FOUND
    assert server.archives() == []
