"""Where a model's configuration comes from: the known models, a bucket, or the Hub; and a model without."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.exceptions import Forbidden

from dropforge.base.errors import InvalidSpec, SpecProblem
from dropforge.base.settings import Settings
from dropforge.cloud.clients import Clients
from dropforge.fit.configuration import NoConfiguration, find_shape
from dropforge.fit.known import KNOWN_MODELS
from dropforge.spec import Dataset, JobSpec
from dropforge.spec.sections import Model
from dropforge.stages import admission
from dropforge.stages.admission import fit_problems

from ..deployments import Memory, cloud_with, settings_with
from .test_dry_run import L4, spec_of

TINY = {**KNOWN_MODELS["Qwen/Qwen3-0.6B"].config, "num_hidden_layers": 2}
FILES = {
    "/owner/model/resolve/main/config.json": json.dumps(TINY).encode(),
    "/owner/model/resolve/refs%2Fpr%2F1/config.json": json.dumps({**TINY, "num_hidden_layers": 3}).encode(),
    "/owner/broken/resolve/main/config.json": b"{",
    "/owner/list/resolve/main/config.json": b"[]",
    "/owner/short/resolve/main/config.json": b'{"model_type": "llama"}',
    "/owner/wrong/resolve/main/config.json": json.dumps({**TINY, "hidden_size": "wide"}).encode(),
    "/owner/other/resolve/main/config.json": b'{"model_type": "mamba"}',
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """A server with the Hub's path of a file; a gated model answers 401."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = FILES.get(self.path)
            self.send_response(401 if data is None else 200)
            self.end_headers()
            self.wfile.write(data or b"Access to model is restricted")

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_known_model_needs_no_network() -> None:
    assert find_shape(Model(source="google/gemma-2b"), None).parameters == 2_506_172_416
    with pytest.raises(NoConfiguration, match="the Hub is not asked"):  # another revision may have other sizes
        find_shape(Model(source="google/gemma-2b", revision="v2"), Clients({"HF_HUB_OFFLINE": "1"}))


def test_a_public_model_s_configuration_comes_from_the_hub(hub: str) -> None:
    clients = Clients({"HF_ENDPOINT": hub})
    assert find_shape(Model(source="owner/model"), clients).layers == 2
    assert find_shape(Model(source="owner/model", revision="refs/pr/1"), clients).layers == 3


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("owner/gated", "401"),
        ("owner/broken", "no config.json"),
        ("owner/list", "not a JSON object"),
        ("owner/short", "lacks a size: KeyError('hidden_size')"),
        ("owner/wrong", "lacks a size"),
        ("owner/other", "of the type 'mamba'"),
    ],
)
def test_a_configuration_that_cannot_be_had_names_the_reason(hub: str, source: str, reason: str) -> None:
    with pytest.raises(NoConfiguration) as caught:
        find_shape(Model(source=source), Clients({"HF_ENDPOINT": hub}))
    assert reason in str(caught.value)
    assert source in str(caught.value)


def test_a_bucket_s_model_is_read_with_the_deployment_s_client() -> None:
    storage = Memory()
    storage.objects["base/tiny/config.json"] = (json.dumps(TINY).encode(), 1)
    clients = cloud_with(storage=storage).clients
    for source in ("gs://models/base/tiny", "gs://models/base/tiny/"):
        assert find_shape(Model(source=source), clients).layers == 2
    with pytest.raises(NoConfiguration, match=r"no config\.json of gs://models/none"):
        find_shape(Model(source="gs://models/none"), clients)


def test_admission_refuses_by_the_configuration_and_not_by_the_name() -> None:
    """A bucket's name has no size. Everything that the spec names exists."""
    storage = Memory()
    dataset = {"source": "gs://models/rows.jsonl", "format": "messages"}
    spec = spec_of(L4, model={"source": "gs://models/large"}, secrets={"HF_TOKEN": "token"}, serve=None)
    spec = spec.model_copy(update={"dataset": Dataset.model_validate(dataset)})
    config = KNOWN_MODELS["meta-llama/Llama-3.1-70B"].config
    storage.objects |= {"large/config.json": (json.dumps(config).encode(), 1), "rows.jsonl": (b"{}", 1)}
    cloud = cloud_with(storage=storage, secrets=SimpleNamespace(get_secret_version=enabled))
    with pytest.raises(InvalidSpec) as caught:
        admission.check(cloud, spec)
    assert {problem.pointer for problem in caught.value.problems} == {"/model/source", "/target/disk_gib"}


GOOD_ROW = b'{"prompt": "why not", "completion": "so"}\n'


@pytest.mark.parametrize(
    ("bucket", "rows", "told"),
    [
        ("data", GOOD_ROW * 30, ""),
        ("data", GOOD_ROW * 30 + b'{"prompt": "why", "completion": "so", "label": false}', "row"),
        ("data", GOOD_ROW + b'{"prompt": ', "line 2 of the data set is not JSON"),
        ("data", b'{"chosen": "a", "rejected": "b"}', "chosen"),
        ("data", b"\x1f\x8b compressed while it is stored", ""),
        ("runs", b'{"secret": 1}', ""),
        ("specs", b'{"secret": 1}', ""),
    ],
)
def test_admission_refuses_by_the_first_rows_of_the_data(bucket: str, rows: bytes, told: str) -> None:
    """The buckets of specs and runs are not read: their objects may be of other users."""
    storage, source = Memory(), f"gs://{bucket}-bucket/rows.jsonl"
    storage.objects |= {"rows.jsonl": (rows, 1)}
    spec = spec_of(L4, serve=None)
    spec = spec.model_copy(update={"dataset": Dataset.model_validate({"source": source})})
    settings = settings_with(specs_bucket="specs-bucket", runs_bucket="runs-bucket")
    assert [told in str(problem) for problem in problems_of(settings, storage, spec)] == ([True] if told else [])


@pytest.mark.parametrize("what", ["policy", "forbidden"])
def test_admission_tells_nothing_about_data_that_the_submitter_or_it_may_not_read(what: str) -> None:
    storage = Memory()
    storage.objects |= {"rows.jsonl": (b'{"secret": 1}', 1)}
    if what == "forbidden":
        storage.blob = forbidden  # type: ignore[assignment]
    spec = spec_of(L4, serve=None)
    spec = spec.model_copy(update={"dataset": Dataset.model_validate({"source": "gs://data/rows.jsonl"})})
    policy = json.dumps({"api_version": "dropforge/v1", "datasets": ["gs://other/*"]}) if what == "policy" else ""
    problems = problems_of(settings_with(policy=policy), storage, spec)
    assert "secret" not in str(problems)
    assert bool(problems) is (what == "policy")


def forbidden(name: str) -> Any:
    raise Forbidden(name)


def problems_of(settings: Settings, storage: Memory, spec: JobSpec) -> list[SpecProblem]:
    try:
        admission.check(
            cloud_with(settings, storage=storage, secrets=SimpleNamespace(get_secret_version=enabled)), spec
        )
    except InvalidSpec as error:
        return error.problems
    return []


def enabled(**_: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(name="ENABLED"))


def test_the_local_stack_asks_no_hub() -> None:
    with pytest.raises(NoConfiguration, match="the Hub is not asked"):
        find_shape(Model(source="owner/model"), Clients({"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"}))


def test_without_a_configuration_the_size_in_the_name_decides() -> None:
    named, unnamed = (spec_of(L4, model={"source": f"owner/{name}"}) for name in ("model-70b", "model"))
    [problem] = fit_problems(named, None)
    assert problem.message == "the model does not fit the accelerator"
    assert fit_problems(unnamed, None) == []
