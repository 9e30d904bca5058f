"""The contract of the serving container, through the openai client, and the parity seal against real engines.

`transformers serve` runs in a process of the container, vLLM's CPU build in a local stack, as the end of a whole run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from containers.common.chat import load_tokenizer
from containers.common.sealing import make_seal
from containers.serve_vllm import vllm_cpu
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.rows import Row
from dropforge.run.artifacts import Manifest, download_prefix, read_artifact, read_manifest
from dropforge.run.record import Parity, RunState
from dropforge.run.seal import ROWS, Seal, SealedRow, read_seal
from dropforge.spec import parse_spec
from dropforge.stages.parity import Endpoint as Asked
from dropforge.stages.parity import progress
from dropforge_local.base.ports import free_port

from .. import forked
from ..conftest import RUNS, Attempt, Trainer, job_spec
from ..forked import Forked
from ..trained import int4
from .answers import ANSWERS, CHAT, HELLO, TEXT
from .conftest import MAX_MODEL_LEN, TRAINING, WholeRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first test trains the model that the others serve
ROOT = Path(__file__).resolve().parents[3]
SEALED_ROWS = 8  # a seal has up to 32; fewer take less time
PORTS = range(24000, 30000)  # below the ports that the kernel gives to clients


@dataclass
class Endpoint:
    """An endpoint, the committed model that it serves, and how it ends."""

    url: str
    openai: openai.OpenAI
    token: str
    client: Any
    bucket: str
    manifest: Manifest
    processes: Callable[[], list[psutil.Process]]
    end: Callable[[], None]
    is_vllm: bool = False

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The held-out rows that the trainer kept with the model's answers."""
        return list(json.loads(read_artifact(self.client, self.bucket, self.manifest, "samples.json")))

    @property
    def seal(self) -> Seal:
        """The first rows of the model's seal."""
        seal = read_seal(self.client, self.bucket, self.manifest)
        assert seal is not None
        return seal.model_copy(update={"rows": seal.rows[:SEALED_ROWS]})

    def post(self, route: str, **options: Any) -> requests.Response:
        return self.ask("POST", f"/v1/{route}", **options)

    def ask(self, method: str, path: str, content_type: str = "application/json", **options: Any) -> requests.Response:
        headers = {"Content-Type": content_type, "Authorization": f"Bearer {self.token}"}
        return requests.request(method, f"{self.url}{path}", headers=headers, timeout=PATIENCE_SECONDS, **options)


def start(cloud: Any, model_uri: str, port: int, **environment: str) -> subprocess.Popen[str]:
    """Start a server with the interpreters and the imports of a real container."""
    command = [sys.executable, "-P", "-m", forked.SERVE]
    values = server_environment(cloud, model_uri, port, **environment)
    return subprocess.Popen(command, env=values, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def fork(cloud: Any, model_uri: str, port: int, **environment: str) -> Forked:
    """Start a server that computes with `transformers serve`, without the imports (forked.py)."""
    forked.prepare(cloud.environment())
    values = server_environment(cloud, model_uri, port, DROPFORGE_ENGINE="transformers", **environment)
    return Forked(values, forked.SERVE)


def server_environment(cloud: Any, model_uri: str, port: int, **environment: str) -> dict[str, str]:
    return {
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


def wait_until_ready(process: subprocess.Popen[str] | Forked, url: str, timeout: float = PATIENCE_SECONDS) -> None:
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


@pytest.fixture(scope="module")
def trained(cloud: Any) -> tuple[Attempt, Manifest]:
    """An attempt that has committed a model."""
    trainer = Trainer(cloud)
    attempt = trainer.start(job_spec(training=TRAINING))
    assert attempt.wait() == 0, attempt.output
    return attempt, trainer.manifest(attempt.run)


@pytest.fixture(scope="module")
def stand_in(cloud: Any, trained: tuple[Attempt, Manifest]) -> Iterator[Endpoint]:
    """`transformers serve`, in a process of the container. test_real_demo.py starts both with imports."""
    attempt, manifest = trained
    port = free_port(PORTS, set())
    url = f"http://127.0.0.1:{port}"
    process = fork(cloud, f"gs://{RUNS}/models/{attempt.run}", port)

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0

    try:
        wait_until_ready(process, url)
        with client_of(url, "unused") as client:
            children = partial(psutil.Process(process.pid).children, recursive=True)
            yield Endpoint(url, client, "unused", cloud.client, RUNS, manifest, children, end)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def vllm(vllm_run: WholeRun) -> Iterator[Endpoint]:
    """vLLM's CPU build, in the container that a whole run has deployed and compared with its seal."""
    deployment, record = vllm_run.deployment, vllm_run.record
    endpoint = record.endpoint
    assert endpoint is not None, record
    assert record.state is RunState.SUCCEEDED, record.error
    assert record.parity is not None
    assert (record.parity.state, record.parity.rows) == ("sealed", ROWS)
    commands = [" ".join(process.cmdline()) for process in vllm_run.processes()]
    assert any("serve_vllm/vllm_cpu.py --model" in command for command in commands), commands
    assert not any("spawn_main" in command for command in commands), "each spawned process would import vLLM"
    storage, bucket = deployment.clients.storage(), deployment.settings.runs_bucket
    manifest = read_manifest(storage, bucket, vllm_run.run)
    assert manifest is not None
    token, url = vllm_run.token, endpoint.url
    with client_of(url, token) as client:
        yield Endpoint(url, client, token, storage, bucket, manifest, vllm_run.processes, vllm_run.end, is_vllm=True)


@pytest.fixture(scope="module", params=["stand_in", "vllm"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    found: Endpoint = request.getfixturevalue(request.param)
    return found


def client_of(url: str, token: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=PATIENCE_SECONDS)


def test_the_model_is_listed_under_its_served_name(endpoint: Endpoint) -> None:
    assert [model.id for model in endpoint.openai.models.list()] == ["text-to-sql"]


def test_answers_are_those_of_the_evaluation(endpoint: Endpoint) -> None:
    for sample in endpoint.samples:
        answer = endpoint.openai.chat.completions.create(
            model="text-to-sql", messages=sample["prompt"], max_tokens=40, temperature=0
        )
        assert answer.model == "text-to-sql"
        assert (answer.choices[0].message.content or "").strip() == sample["after"]
    assert answer.choices[0].finish_reason == "stop"


def test_without_a_limit_the_answer_ends_at_its_turn(endpoint: Endpoint) -> None:
    answer = endpoint.openai.chat.completions.create(
        model="text-to-sql", messages=endpoint.samples[0]["prompt"], temperature=0
    )
    assert (answer.choices[0].message.content or "").strip() == endpoint.samples[0]["after"]


def test_streams_carry_the_same_answer_and_end_with_done(endpoint: Endpoint) -> None:
    body = {
        "model": "text-to-sql",
        "messages": endpoint.samples[0]["prompt"],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
    }
    stream = endpoint.openai.chat.completions.create(**body)
    chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {"text-to-sql"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == endpoint.samples[0]["after"]
    raw = endpoint.post("chat/completions", json=body)
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
        model="text-to-sql", prompt=prompt, max_tokens=MAX_MODEL_LEN - 1, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens <= MAX_MODEL_LEN
    with pytest.raises(openai.BadRequestError):
        endpoint.openai.completions.create(model="text-to-sql", prompt=prompt, max_tokens=100_000, temperature=0)


def test_without_a_limit_a_completion_has_16_tokens_at_most(endpoint: Endpoint) -> None:
    answer = endpoint.openai.completions.create(model="text-to-sql", prompt="how many cars are there")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16


WRONG_FIELDS = [
    {"messages": []},
    {"temperature": "x"},
    {"temperature": -1},
    {"temperature": 3},
    {"stop": 3},
    {"seed": "x"},
    {"top_p": 0},
    {"max_tokens": 0},
    {"max_tokens": 100_000},
    {"messages": [{"content": "no role"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.invalid/b"}}]}]},
    {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "type": "function"}]}]},
]


@pytest.mark.parametrize("wrong", WRONG_FIELDS, ids=str)
def test_a_wrong_field_is_a_bad_request_and_harms_no_later_request(endpoint: Endpoint, wrong: dict[str, Any]) -> None:
    good = {"model": "text-to-sql", "messages": endpoint.samples[0]["prompt"], "max_tokens": 1}
    refused = endpoint.post("chat/completions", json={**good, **wrong})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["message"]
    assert [endpoint.post("chat/completions", json=good).status_code for _ in range(3)] == [200] * 3


def test_a_message_may_be_a_list_of_texts(endpoint: Endpoint) -> None:
    prompt = endpoint.samples[0]["prompt"]
    parts: Any = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in prompt]
    answer = endpoint.openai.chat.completions.create(model="text-to-sql", messages=parts, max_tokens=40, temperature=0)
    assert (answer.choices[0].message.content or "").strip() == endpoint.samples[0]["after"]


def test_several_prompts_have_a_choice_each(endpoint: Endpoint) -> None:
    def ask(prompt: Any) -> Any:
        return endpoint.openai.completions.create(model="text-to-sql", prompt=prompt, max_tokens=4, temperature=0)

    prompts = ["select ", "how many cars"]
    alone, both = [ask(prompt) for prompt in prompts], ask(prompts)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]
    assert both.usage.total_tokens == sum(answer.usage.total_tokens for answer in alone)


def test_a_stop_text_ends_an_answer_before_it(endpoint: Endpoint) -> None:
    whole = endpoint.samples[0]["after"]
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    answer = endpoint.openai.chat.completions.create(
        model="text-to-sql", messages=endpoint.samples[0]["prompt"], max_tokens=40, temperature=0, stop=[stop]
    )
    assert (answer.choices[0].message.content or "").strip() == whole[: whole.index(stop)].strip()
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_tells_its_usage_last_and_only_if_asked(endpoint: Endpoint) -> None:
    body: Any = {"model": "text-to-sql", "messages": endpoint.samples[0]["prompt"], "max_tokens": 4, "stream": True}
    assert not any(chunk.usage for chunk in endpoint.openai.chat.completions.create(**body))
    *chunks, last = endpoint.openai.chat.completions.create(**body, stream_options={"include_usage": True})
    assert not any(chunk.usage for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 4


def test_metrics_count_requests_as_vllm_does(endpoint: Endpoint) -> None:
    def finished() -> float:
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        text = requests.get(f"{endpoint.url}/metrics", headers=headers, timeout=PATIENCE_SECONDS).text
        samples = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
        counts = [float(line.rsplit(" ", 1)[1]) for line in samples if 'finished_reason="length"' in line]
        assert all('model_name="text-to-sql"' in line for line in samples)
        assert "vllm:num_requests_waiting{" in text
        return sum(counts)

    before = finished()
    body = {"model": "text-to-sql", "messages": endpoint.samples[0]["prompt"], "max_tokens": 1}
    assert endpoint.post("chat/completions", json=body).status_code == 200
    assert finished() == before + 1


@pytest.mark.parametrize(
    "body", ["not json", "[1]", '{"model": "text-to-sql", "messages": "hello"}', '{"model": "text-to-sql"}']
)
def test_malformed_requests_are_bad_requests(endpoint: Endpoint, body: str) -> None:
    response = endpoint.post("chat/completions", data=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("name", ANSWERS)
def test_both_engines_give_the_same_answers_and_errors_of_openai_s_shape(endpoint: Endpoint, name: str) -> None:
    method, path, options, status = ANSWERS[name]
    answer = endpoint.ask(method, path, **options)
    assert answer.status_code == status, answer.text[:1000]
    if status == 200:
        assert answer.json()["model"] == "text-to-sql"
    else:
        assert answer.json()["error"]["message"]
        assert {"type", "param", "code"} < answer.json()["error"].keys()


ROUTES: list[tuple[str, str, dict[str, Any], str]] = [
    ("GET", "/version", {}, "version"),
    ("POST", "/tokenize", {"json": {"prompt": "select"}}, "tokens"),
    ("POST", "/detokenize", {"json": {"tokens": [5, 6]}}, "prompt"),
    ("POST", "/v1/responses", {"json": {"input": "select", "max_output_tokens": 16}}, "output"),
    ("POST", "/v1/messages", {"json": {"model": "text-to-sql", "messages": HELLO, "max_tokens": 4}}, "content"),
]


@pytest.mark.parametrize(("method", "path", "options", "key"), ROUTES)
def test_other_routes_are_vllm_s_own_and_the_stand_in_says_that_it_lacks_them(
    endpoint: Endpoint, method: str, path: str, options: dict[str, Any], key: str
) -> None:
    answer = endpoint.ask(method, path, **options)
    if endpoint.is_vllm:
        assert answer.status_code == 200, answer.text
        assert key in answer.json()
    else:
        assert answer.status_code == 404
        assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "start"), [(CHAT, "chatcmpl-"), (TEXT, "cmpl-")])
def test_answers_and_their_chunks_have_the_ids_and_keys_of_openai_s(endpoint: Endpoint, path: str, start: str) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "select"}
    whole = endpoint.ask("POST", path, json={**body, "max_tokens": 2}).json()
    assert whole["id"].startswith(start)
    assert {"index", "finish_reason", "logprobs"} < whole["choices"][0].keys()
    streamed = {**body, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line for line in endpoint.ask("POST", path, json=streamed).text.splitlines() if line]
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    assert last["id"].startswith(start)
    assert all("finish_reason" in choice for chunk in chunks for choice in chunk["choices"])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


def test_a_seed_gives_one_answer_whatever_runs_beside_it(endpoint: Endpoint) -> None:
    def ask(seed: int) -> str:
        answer = endpoint.openai.completions.create(
            model="text-to-sql", prompt="select ", max_tokens=40, temperature=2, seed=seed
        )
        return answer.choices[0].text

    seeds = [1, 2, 1, 3, 1, 2]
    alone = [ask(seed) for seed in seeds]
    with ThreadPoolExecutor(len(seeds)) as pool:
        assert list(pool.map(ask, seeds)) == alone
    assert len(set(alone)) == 3


def test_concurrent_requests_are_all_answered(endpoint: Endpoint) -> None:
    def ask(_: int) -> str:
        return (
            endpoint.openai.chat.completions.create(
                model="text-to-sql", messages=endpoint.samples[0]["prompt"], max_tokens=40, temperature=0
            ).choices[0].message.content
            or ""
        )  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        assert {answer.strip() for answer in pool.map(ask, range(8))} == {endpoint.samples[0]["after"]}


class Sampling:
    """A session whose chat requests are sampled, as by an engine that keeps the base model's defaults."""

    def __init__(self, session: requests.Session) -> None:
        self._session = session

    def post(self, url: str, json: dict[str, Any], timeout: float) -> requests.Response:
        body = {"temperature": 2.0, **json} if "messages" in json else json
        return self._session.post(url, json=body, timeout=timeout)


def session_of(endpoint: Endpoint) -> requests.Session:
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {endpoint.token}"
    return session


def parity(endpoint: Endpoint, seal: Seal, session: Any = None) -> Parity:
    """The verdict of stage deploy on the endpoint. Raises CloudError."""
    asked = Asked(session or session_of(endpoint), endpoint.url, "text-to-sql")
    *_, last = progress(Parity(state="checking"), seal, asked)
    return last


def cause(endpoint: Endpoint, seal: Seal, session: Any = None) -> str:
    """Why stage deploy refuses the endpoint."""
    with pytest.raises(CloudError) as caught:
        parity(endpoint, seal, session)
    assert caught.value.error_class is ErrorClass.PARITY
    return caught.value.message.rpartition("likely cause: ")[2]


def test_the_endpoint_answers_as_its_model(endpoint: Endpoint) -> None:
    found = parity(endpoint, endpoint.seal)
    assert (found.state, found.rows) == ("sealed", SEALED_ROWS)
    assert found.divergence < endpoint.seal.limit / 2, "the margin to a fault is lost"


@pytest.fixture(scope="module")
def exported(endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the model that the endpoint serves."""
    directory = tmp_path_factory.mktemp("exported")
    manifest = endpoint.manifest
    download_prefix(endpoint.client, f"gs://{endpoint.bucket}/models/{manifest.run}/{manifest.serve_path}", directory)
    return directory


def scaled(exported: Any, base: Any) -> Any:
    """The exported model as if its adapter had nine tenths of its scale."""
    import torch

    with torch.no_grad():
        for new, old in zip(exported.parameters(), base.parameters(), strict=True):
            new.copy_(old + 0.9 * (new - old))
    return exported


WEIGHTS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "scale x 0.9": (scaled, "scale"),
    "int4": (lambda exported, base: int4(exported), "quantisation"),
    "unmerged adapter": (lambda exported, base: base, "adapter"),
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_other_weights_than_the_sealed_ones_are_refused(
    endpoint: Endpoint, exported: Path, base_model: Path, fault: str
) -> None:
    """The seal is of the faulty model, and the endpoint serves the good one: they differ as in the reverse case."""
    from transformers import AutoModelForCausalLM

    change, word = WEIGHTS[fault]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (exported, base_model)]
    spec = parse_spec(json.dumps(job_spec(serve={"type": "cloud_run", "max_model_len": MAX_MODEL_LEN})).encode())
    rows = [Row((*row.messages, {"role": "assistant", "content": "?"})) for row in endpoint.seal.rows if row.messages]
    tokenizer = load_tokenizer(str(exported), trust_remote_code=False)
    seal = make_seal(change(*models), tokenizer, rows, spec)
    assert seal is not None
    assert word in cause(endpoint, seal)


PROMPTS: dict[str, tuple[Callable[[list[int]], list[int]], str]] = {
    "first token lost": (lambda prompt: prompt[1:], "bos: the endpoint's prompt has a further first token"),
    "first token twice": (lambda prompt: [prompt[0], *prompt], "bos: the endpoint's prompt lacks its first token"),
    "newline lost": (lambda prompt: prompt[:-1], "the chat template, or the tokenizer"),
    "another template": (lambda prompt: [prompt[0], *prompt[3:-3]], "the chat template, or the tokenizer"),
}


@pytest.mark.parametrize("fault", PROMPTS)
def test_another_prompt_than_the_sealed_one_is_refused(endpoint: Endpoint, fault: str) -> None:
    change, expected = PROMPTS[fault]
    first: SealedRow = endpoint.seal.rows[0]
    row = first.model_copy(update={"prompt": change(first.prompt)})
    assert cause(endpoint, endpoint.seal.model_copy(update={"rows": [row]})) == expected


def test_sampling_defaults_of_the_base_are_refused(endpoint: Endpoint) -> None:
    assert "generation config" in cause(endpoint, endpoint.seal, Sampling(session_of(endpoint)))


def test_its_end_ends_every_process(endpoint: Endpoint) -> None:
    """SIGTERM, or a request to end a run's endpoint. Keep this test last: the other tests use the endpoint."""
    processes = endpoint.processes()
    assert processes
    endpoint.end()
    assert alive(processes, timeout=PATIENCE_SECONDS) == []


def test_the_engine_does_not_outlive_a_killed_server(cloud: Any, trained: Any) -> None:
    if sys.platform != "linux":
        pytest.skip("PR_SET_PDEATHSIG is Linux's")
    process = start(cloud, f"gs://runs-bucket/models/{trained[0].run}", free_port(PORTS, set()))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert alive(children, timeout=PATIENCE_SECONDS) == []
    assert process.stdout is not None
    process.stdout.close()


def test_an_engine_that_dies_ends_the_server(cloud: Any, trained: Any) -> None:
    process = start(cloud, f"gs://runs-bucket/models/{trained[0].run}", free_port(PORTS, set()))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(children[0].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 70
    assert "the engine ended with -9" in output


def test_the_engine_that_vllm_s_server_forks_has_all_threads_but_the_server_s(cloud: Any) -> None:
    forked.prepare(cloud.environment())
    reading, writing = forked.CONTEXT.Pipe(duplex=False)
    process = forked.CONTEXT.Process(target=threads_of_server_and_engine, args=(writing,))
    process.start()
    writing.close()
    assert [reading.recv(), reading.recv()] == [("server", 1), ("engine", 2)]
    process.join()


def threads_of_server_and_engine(sender: Connection) -> None:
    """Send how many threads compute in this process, as vLLM's server, and then in a process that it forks."""
    import torch

    torch.set_num_threads(3)
    vllm_cpu.compute_with_one_thread()
    sender.send(("server", torch.get_num_threads()))
    if engine := os.fork():
        os.waitpid(engine, 0)
    else:
        sender.send(("engine", torch.get_num_threads()))
        os._exit(0)


def test_on_a_tpu_the_weights_are_on_disk_before_vllm_takes_over(cloud: Any, trained: Any, tmp_path: Path) -> None:
    """With a `vllm` script that prints its arguments: the real vLLM has no chips here."""
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "vllm $*"\nls "$2"\nenv | grep ^VLLM_XLA\n')
    (tmp_path / "vllm").chmod(0o755)
    code = "from containers.serve_vllm import serve; serve.has_tpu = lambda: True; raise SystemExit(serve.main())"
    environment = {
        **cloud.environment(),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
        "DROPFORGE_ENGINE": "vllm",
        "DROPFORGE_MODEL_URI": f"gs://runs-bucket/models/{trained[0].run}",
        "DROPFORGE_SERVED_MODEL_NAME": "text-to-sql",
        "DROPFORGE_TENSOR_PARALLEL_SIZE": "8",
        "DROPFORGE_WORK_DIRECTORY": str(tmp_path / "work"),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert f"vllm serve {tmp_path}/work/model --served-model-name text-to-sql" in done.stdout
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(done.stdout.split())
    assert f"VLLM_XLA_CACHE_PATH={tmp_path}/work/compiled/xla" in done.stdout, "without a directory for the bucket, too"


def test_without_a_manifest_nothing_is_served(cloud: Any) -> None:
    process = start(cloud, "gs://runs-bucket/models/never-trained", free_port(PORTS, set()))
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 66
    assert "gs://runs-bucket/models/never-trained has no MANIFEST.json" in output


def test_files_that_differ_from_the_manifest_are_not_served(cloud: Any, trained: Any) -> None:
    bucket, run = cloud.client.bucket("runs-bucket"), trained[0].run
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


def test_the_record_tells_the_parts_of_the_start(vllm_run: WholeRun) -> None:
    endpoint = vllm_run.record.endpoint
    assert endpoint is not None
    assert list(endpoint.start) == ["program", "check of the model", "weights", "engine"]
    assert endpoint.start["engine"] > 0
