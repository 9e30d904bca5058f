"""Two adapters beside their base, from the training to answers by name: the trainer's export, the server's process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from containers.serve_vllm.adapters import VARIABLE
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.endpoints.shared import base_of, why_unfit
from dropforge.run.artifacts import Manifest, files_digest
from dropforge.run.record import Parity
from dropforge.run.seal import Seal, read_seal
from dropforge.spec import parse_spec
from dropforge.stages.parity import Endpoint as Asked
from dropforge.stages.parity import progress
from dropforge_local.base.ports import free_port

from ..conftest import RUNS, Trainer, job_spec
from ..forked import Forked
from .conftest import MAX_MODEL_LEN
from .test_serve import PORTS, client_of, fork, start, wait_until_ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first test trains both adapters
SERVE = {"type": "cloud_run", "share": True, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2}
SEEDS = {"sql": 1, "other": 2}
ROWS = 4  # of a seal


@dataclass
class Shared:
    """A server of the adapters of two runs, and what they have committed."""

    url: str
    openai: openai.OpenAI
    manifests: dict[str, Manifest]
    seals: dict[str, Seal]


def adapter(name: str, manifest: Manifest, **changes: str) -> dict[str, str]:
    assert manifest.adapter_path is not None
    return {"name": name, "run": manifest.run, "digest": files_digest(manifest, manifest.adapter_path), **changes}


@pytest.fixture(scope="module")
def committed(cloud: Any) -> dict[str, Manifest]:
    """The manifests of two runs with the same base and other seeds; their trainings run at once."""
    trainer = Trainer(cloud)
    trainings = {name: {"seed": seed, "max_steps": 8} for name, seed in SEEDS.items()}
    specs = {name: job_spec(name=name, serve=SERVE, training=each, evaluation=None) for name, each in trainings.items()}
    attempts = {name: trainer.start(spec) for name, spec in specs.items()}
    for attempt in attempts.values():
        assert attempt.wait() == 0, attempt.output
    return {name: trainer.manifest(attempt.run) for name, attempt in attempts.items()}


VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.engines,
        pytest.mark.skipif(
            not os.environ.get("DROPFORGE_TEST_FAMILIES"),
            reason="another minute; set DROPFORGE_TEST_FAMILIES=1 to run it",
        ),
    ],
)


@pytest.fixture(scope="module", params=["transformers", VLLM])
def shared(request: pytest.FixtureRequest, cloud: Any, committed: dict[str, Manifest]) -> Iterator[Shared]:
    """The server, with each engine of a CPU."""
    port, base = free_port(PORTS, set()), committed["sql"].run
    url, adapters = f"http://127.0.0.1:{port}", [adapter(name, manifest) for name, manifest in committed.items()]
    process: subprocess.Popen[str] | Forked
    if request.param == "vllm":
        path = f"{request.getfixturevalue('vllm_environment') / 'bin'}:{os.environ['PATH']}"
        process = start(cloud, uri(base), port, **names(adapters), DROPFORGE_ENGINE="vllm", PATH=path)
    else:
        process = serve(cloud, base, port, adapters)
    try:
        wait_until_ready(process, url)
        seals = {name: read_seal(cloud.client, RUNS, manifest) for name, manifest in committed.items()}
        with client_of(url, "unused") as client:
            found = {name: seal.model_copy(update={"rows": seal.rows[:ROWS]}) for name, seal in seals.items() if seal}
            yield Shared(url, client, committed, found)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def serve(cloud: Any, base: str, port: int, adapters: list[dict[str, str]]) -> Forked:
    return fork(cloud, uri(base), port, **names(adapters))


def uri(run: str) -> str:
    return f"gs://{RUNS}/models/{run}"


def names(adapters: list[dict[str, str]]) -> dict[str, str]:
    """The variables that name the base and the adapters."""
    return {"DROPFORGE_SERVED_MODEL_NAME": "base", VARIABLE: json.dumps(adapters)}


def compared(shared: Shared, seal: Seal, model: str) -> Parity:
    with requests.Session() as session:
        *_, last = progress(Parity(state="checking"), seal, Asked(session, shared.url, model))
        return last


def test_the_export_is_the_base_unchanged_with_the_adapter_beside_it(
    cloud: Any, committed: dict[str, Manifest]
) -> None:
    serving = parse_spec(json.dumps(job_spec(serve=SERVE)).encode()).serve
    assert serving is not None
    assert len({base_of(manifest, serving).digest for manifest in committed.values()}) == 1
    assert {why_unfit(manifest) for manifest in committed.values()} == {""}
    weights = cloud.client.bucket("data-bucket").blob("tiny/model.safetensors").download_as_bytes()
    for manifest in committed.values():
        assert manifest.metrics["adapter_to_saved"] is not None
        blob = cloud.client.bucket(RUNS).blob(f"models/{manifest.run}/{manifest.serve_path}/model.safetensors")
        assert blob.download_as_bytes() == weights


def test_each_name_has_a_model(shared: Shared) -> None:
    assert [model.id for model in shared.openai.models.list()] == ["base", *SEEDS]
    with pytest.raises(openai.NotFoundError, match="The model `third` does not exist"):
        shared.openai.completions.create(model="third", prompt="select", max_tokens=1)


@pytest.mark.parametrize("name", SEEDS)
def test_each_adapter_answers_by_its_own_seal_and_by_no_other(shared: Shared, name: str) -> None:
    assert compared(shared, shared.seals[name], name).state == "sealed"
    for other in {"base", *SEEDS} - {name}:
        with pytest.raises(CloudError) as differs:
            compared(shared, shared.seals[name], other)
        assert differs.value.error_class is ErrorClass.PARITY


def test_streams_at_the_same_time_carry_the_name_and_the_answer_of_their_adapter(shared: Shared) -> None:
    """One model computes them all."""
    for name, seal in shared.seals.items():
        messages: Any = seal.rows[0].messages
        asked = {"model": name, "messages": messages, "max_tokens": 20}
        streams = {
            other: shared.openai.chat.completions.create(**{**asked, "model": other}, stream=True)
            for other in ("base", *SEEDS)
        }
        texts = {}
        for other, stream in streams.items():
            chunks = list(stream)
            assert {chunk.model for chunk in chunks} == {other}
            texts[other] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        alone = shared.openai.chat.completions.create(**asked)
        assert (alone.model, alone.choices[0].message.content) == (name, texts[name])


def test_an_adapter_that_is_not_the_one_of_the_revision_is_not_served(
    cloud: Any, committed: dict[str, Manifest]
) -> None:
    good, other = committed.values()
    wrong = [
        (adapter("sql", good, digest="0" * 64), "; expected 000000000000"),
        (adapter("sql", good, run="never-0123456789ab"), "does not exist"),
    ]
    for each, why in wrong:
        process = serve(cloud, other.run, free_port(PORTS, set()), [each])
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 66, output
        assert why in output
