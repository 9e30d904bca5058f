"""The contract of the serving container, through the openai client, for every installed engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from dropforge_local.base.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first test trains the model that the others serve
ROOT = Path(__file__).resolve().parents[3]
ENGINES = ["transformers", *(["vllm"] if find_spec("vllm") else [])]
MAX_MODEL_LEN = 96
PORTS = range(20000, 30000)  # below the ports that the kernel gives to clients


@dataclass
class Endpoint:
    process: subprocess.Popen[str]
    url: str
    openai: openai.OpenAI


def start(cloud: Any, model_uri: str, port: int, **environment: str) -> subprocess.Popen[str]:
    values = {
        **cloud.environment(),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
        "DROPFORGE_MODEL_URI": model_uri,
        "DROPFORGE_SERVED_MODEL_NAME": "text-to-sql",
        "DROPFORGE_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "DROPFORGE_MAX_NUM_SEQS": "2",
        "HOST": "127.0.0.1",
        "PORT": str(port),
        **environment,
    }
    command = [sys.executable, "-m", "containers.serve_vllm.serve"]
    return subprocess.Popen(command, env=values, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until_ready(process: subprocess.Popen[str], url: str, timeout: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        try:
            if requests.get(f"{url}/health", timeout=PATIENCE_SECONDS).status_code == 200:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not ready after {timeout} s")


def alive(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """The processes that still run; a zombie does not run."""
    _, left = psutil.wait_procs(processes, timeout)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_vllm_is_tested_where_it_is_installed() -> None:
    if "vllm" not in ENGINES:
        pytest.skip("vLLM is not installed (extra `serve`, an environment of its own): its endpoints are not tested")
    assert ENGINES == ["transformers", "vllm"]


@pytest.fixture(scope="module", params=ENGINES)
def endpoint(request: pytest.FixtureRequest, cloud: Any, uninterrupted: Any) -> Iterator[Endpoint]:
    port = free_port(PORTS, set())
    url = f"http://127.0.0.1:{port}"
    uri = f"gs://runs-bucket/models/{uninterrupted[0].run}"
    process = start(cloud, uri, port, DROPFORGE_ENGINE=request.param)
    try:
        wait_until_ready(process, url)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_SECONDS) as client:
            yield Endpoint(process, url, client)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def samples(cloud: Any, uninterrupted: Any) -> list[dict[str, Any]]:
    import json

    from dropforge.run.artifacts import read_artifact

    return list(json.loads(read_artifact(cloud.client, "runs-bucket", uninterrupted[1], "samples.json")))


def test_the_model_is_listed_under_its_served_name(endpoint: Endpoint) -> None:
    assert [model.id for model in endpoint.openai.models.list()] == ["text-to-sql"]


def test_answers_are_those_of_the_evaluation(endpoint: Endpoint, samples: list[dict[str, Any]]) -> None:
    for sample in samples:
        answer = endpoint.openai.chat.completions.create(
            model="text-to-sql", messages=sample["prompt"], max_tokens=40, temperature=0
        )
        assert answer.model == "text-to-sql"
        assert (answer.choices[0].message.content or "").strip() == sample["after"]
    assert answer.choices[0].finish_reason == "stop"


def test_without_a_limit_the_answer_ends_at_its_turn(endpoint: Endpoint, samples: list[dict[str, Any]]) -> None:
    answer = endpoint.openai.chat.completions.create(model="text-to-sql", messages=samples[0]["prompt"], temperature=0)
    assert (answer.choices[0].message.content or "").strip() == samples[0]["after"]


def test_streams_carry_the_same_answer_and_end_with_done(endpoint: Endpoint, samples: list[dict[str, Any]]) -> None:
    body = {
        "model": "text-to-sql",
        "messages": samples[0]["prompt"],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
    }
    stream = endpoint.openai.chat.completions.create(**body)
    chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {"text-to-sql"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == samples[0]["after"]
    raw = requests.post(f"{endpoint.url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)
    assert raw.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in raw.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1


def test_plain_completions_are_served_too(endpoint: Endpoint) -> None:
    answer = endpoint.openai.completions.create(model="text-to-sql", prompt="select ", max_tokens=4, temperature=0)
    assert answer.model == "text-to-sql"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 4


def test_an_unknown_model_is_not_found(endpoint: Endpoint) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        endpoint.openai.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hello"}])
    assert "gpt-9" in caught.value.message


def test_a_prompt_that_does_not_fit_into_the_context_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        endpoint.openai.chat.completions.create(
            model="text-to-sql", messages=[{"role": "user", "content": "how many cars are there " * 60}], max_tokens=4
        )
    assert str(MAX_MODEL_LEN) in caught.value.message


def test_an_answer_ends_with_the_context(endpoint: Endpoint) -> None:
    prompt = "how many cars are there " * 9
    answer = endpoint.openai.completions.create(
        model="text-to-sql", prompt=prompt, max_tokens=10 * MAX_MODEL_LEN, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens <= MAX_MODEL_LEN


@pytest.mark.parametrize(
    "body", ["not json", "[1]", '{"model": "text-to-sql", "messages": "hello"}', '{"model": "text-to-sql"}']
)
def test_malformed_requests_are_bad_requests(endpoint: Endpoint, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = requests.post(
        f"{endpoint.url}/v1/chat/completions", data=body, headers=headers, timeout=PATIENCE_SECONDS
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_concurrent_requests_are_all_answered(endpoint: Endpoint, samples: list[dict[str, Any]]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(_: int) -> str:
        return (
            endpoint.openai.chat.completions.create(
                model="text-to-sql", messages=samples[0]["prompt"], max_tokens=40, temperature=0
            ).choices[0].message.content
            or ""
        )  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        assert {answer.strip() for answer in pool.map(ask, range(8))} == {samples[0]["after"]}


def test_sigterm_ends_everything(endpoint: Endpoint) -> None:
    """Keep this test last: it ends the endpoint that the other tests use."""
    children = psutil.Process(endpoint.process.pid).children(recursive=True)
    assert children
    endpoint.process.send_signal(signal.SIGTERM)
    assert endpoint.process.wait(PATIENCE_SECONDS) == 0
    assert alive(children, timeout=PATIENCE_SECONDS) == []


def test_the_engine_does_not_outlive_a_killed_server(cloud: Any, uninterrupted: Any) -> None:
    if sys.platform != "linux":
        pytest.skip("PR_SET_PDEATHSIG is Linux's")
    process = start(cloud, f"gs://runs-bucket/models/{uninterrupted[0].run}", free_port(PORTS, set()))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert alive(children, timeout=PATIENCE_SECONDS) == []
    assert process.stdout is not None
    process.stdout.close()


def test_an_engine_that_dies_ends_the_server(cloud: Any, uninterrupted: Any) -> None:
    process = start(cloud, f"gs://runs-bucket/models/{uninterrupted[0].run}", free_port(PORTS, set()))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(children[0].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 70
    assert "the engine ended with -9" in output


def test_on_a_tpu_the_weights_are_on_disk_before_vllm_takes_over(
    cloud: Any, uninterrupted: Any, tmp_path: Path
) -> None:
    """With a `vllm` script that prints its arguments: the real vLLM has no chips here."""
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "vllm $*"\nls "$2"\nenv | grep ^VLLM_XLA\n')
    (tmp_path / "vllm").chmod(0o755)
    code = "from containers.serve_vllm import serve; serve.has_tpu = lambda: True; raise SystemExit(serve.main())"
    environment = {
        **cloud.environment(),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
        "DROPFORGE_ENGINE": "vllm",
        "DROPFORGE_MODEL_URI": f"gs://runs-bucket/models/{uninterrupted[0].run}",
        "DROPFORGE_SERVED_MODEL_NAME": "text-to-sql",
        "DROPFORGE_TENSOR_PARALLEL_SIZE": "8",
        "DROPFORGE_WORK_DIRECTORY": str(tmp_path / "work"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert f"vllm serve {tmp_path}/work/model --served-model-name text-to-sql" in done.stdout
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(done.stdout.split())
    assert f"VLLM_XLA_CACHE_PATH={tmp_path}/work/xla" in done.stdout


def test_without_a_manifest_nothing_is_served(cloud: Any) -> None:
    process = start(cloud, "gs://runs-bucket/models/never-trained", free_port(PORTS, set()))
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 66
    assert "gs://runs-bucket/models/never-trained has no MANIFEST.json" in output


def test_files_that_differ_from_the_manifest_are_not_served(cloud: Any, uninterrupted: Any) -> None:
    bucket, run = cloud.client.bucket("runs-bucket"), uninterrupted[0].run
    for blob in list(cloud.client.list_blobs("runs-bucket", prefix=f"models/{run}/")):
        bucket.copy_blob(blob, bucket, blob.name.replace(run, "spoilt"))
    manifest = bucket.blob("models/spoilt/MANIFEST.json")
    manifest.upload_from_string(manifest.download_as_text().replace(run, "spoilt"))
    bucket.blob("models/spoilt/attempt-1/model/config.json").upload_from_string("{}")
    process = start(cloud, "gs://runs-bucket/models/spoilt", free_port(PORTS, set()))
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 66
    assert "attempt-1/model/config.json is 2 bytes" in output


def test_wrong_settings_are_refused(cloud: Any) -> None:
    process = start(cloud, "gs://runs-bucket/somewhere", free_port(PORTS, set()))
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 64
    assert "expected gs://<bucket>/models/<run>" in output
