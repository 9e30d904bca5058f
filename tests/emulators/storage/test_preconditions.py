"""Preconditions on every verb: a table of cases, races, and a property test against a small model."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropforge_local.emulators.storage.preconditions import etag_of

from .conftest import Api, Running

Verb = Callable[[Api, str, dict[str, Any]], requests.Response]


def multipart(api: Api, bucket: str, params: dict[str, Any]) -> requests.Response:
    body = b'--b\r\nContent-Type: application/json\r\n\r\n{"name": "x"}\r\n--b\r\n\r\nnew\r\n--b--\r\n'
    headers = {"Content-Type": "multipart/related; boundary=b"}
    return api.upload("POST", bucket, {"uploadType": "multipart", **params}, data=body, headers=headers)


def resumable(api: Api, bucket: str, params: dict[str, Any]) -> requests.Response:
    started = api.upload("POST", bucket, {"uploadType": "resumable", "name": "x", **params})
    if started.status_code != 200:
        return started
    return api.send(started.headers["Location"], b"new", "bytes 0-2/3")


def to_x(verb: str) -> Verb:
    def act(api: Api, bucket: str, params: dict[str, Any]) -> requests.Response:
        api.put(bucket, "source", b"new")
        return api.call("POST", f"b/{bucket}/o/source/{verb}/b/{bucket}/o/x", params=params)

    return act


def move(api: Api, bucket: str, params: dict[str, Any]) -> requests.Response:
    api.put(bucket, "source", b"new")
    return api.call("POST", f"b/{bucket}/o/source/moveTo/o/x", params=params)


def compose(api: Api, bucket: str, params: dict[str, Any]) -> requests.Response:
    api.put(bucket, "source", b"new")
    return api.call("POST", f"b/{bucket}/o/x/compose", json={"sourceObjects": [{"name": "source"}]}, params=params)


WRITES: dict[str, Verb] = {
    "media": lambda api, bucket, params: api.put(bucket, "x", b"new", **params),
    "multipart": multipart,
    "resumable": resumable,
    "compose": compose,
    "copyTo": to_x("copyTo"),
    "rewriteTo": to_x("rewriteTo"),
    "moveTo": move,
}
OTHERS: dict[str, Verb] = {
    "get": lambda api, bucket, params: api.object("GET", bucket, "x", params=params),
    "media": lambda api, bucket, params: api.object("GET", bucket, "x", params={"alt": "media", **params}),
    "patch": lambda api, bucket, params: api.object("PATCH", bucket, "x", params=params, json={"cacheControl": "a"}),
    "update": lambda api, bucket, params: api.object("PUT", bucket, "x", params=params, json={"cacheControl": "b"}),
    "delete": lambda api, bucket, params: api.object("DELETE", bucket, "x", params=params),
}


def cases(generation: int, metageneration: int) -> list[tuple[dict[str, Any], int | None]]:
    """Query parameters, and the status of the refusal, if any."""
    return [
        ({"ifGenerationMatch": generation}, None),
        ({"ifGenerationMatch": generation - 1}, 412),
        ({"ifGenerationMatch": 0}, 412),
        ({"ifGenerationNotMatch": generation}, 304),
        ({"ifGenerationNotMatch": 0}, None),
        ({"ifMetagenerationMatch": metageneration}, None),
        ({"ifMetagenerationMatch": metageneration + 1}, 412),
        ({"ifMetagenerationNotMatch": metageneration}, 304),
        ({"ifMetagenerationNotMatch": metageneration + 1}, None),
        ({"ifGenerationMatch": generation, "ifMetagenerationMatch": 77}, 412),
    ]


@pytest.mark.parametrize("verb", [*(f"write-{name}" for name in WRITES), *(f"on-{name}" for name in OTHERS)])
def test_every_verb_keeps_every_precondition(api: Api, verb: str) -> None:
    act = WRITES[verb.removeprefix("write-")] if verb.startswith("write-") else OTHERS[verb.removeprefix("on-")]
    for index in range(len(cases(0, 0))):
        bucket = api.bucket()
        before = api.put(bucket, "x", b"old").json()
        params, refused = cases(int(before["generation"]), int(before["metageneration"]))[index]
        status = act(api, bucket, params).status_code
        after = api.object("GET", bucket, "x")
        if refused:
            assert (status, params) == (refused, params)
            assert after.json() == before
        else:
            assert (status < 300, params) == (True, params)


@pytest.mark.parametrize("verb", WRITES)
@pytest.mark.parametrize(
    ("params", "refused"),
    [
        ({"ifGenerationMatch": 0}, None),
        ({"ifGenerationMatch": 5}, 412),
        ({"ifGenerationNotMatch": 5}, 304),
        ({"ifMetagenerationMatch": 1}, 412),
        ({"ifMetagenerationNotMatch": 1}, None),
    ],
)
def test_creating_an_absent_object(api: Api, verb: str, params: dict[str, int], refused: int | None) -> None:
    bucket = api.bucket()
    status = WRITES[verb](api, bucket, params).status_code
    assert (status if status >= 300 else None) == refused
    assert api.object("GET", bucket, "x").status_code == (404 if refused else 200)


@pytest.mark.parametrize("verb", OTHERS)
def test_absent_object_is_404_whatever_the_precondition(api: Api, verb: str) -> None:
    bucket = api.bucket()
    assert OTHERS[verb](api, bucket, {"ifGenerationMatch": 0}).status_code == 404


@pytest.mark.parametrize("verb", ["copyTo", "rewriteTo"])
def test_preconditions_on_the_source_of_a_copy(api: Api, verb: str) -> None:
    bucket = api.bucket()
    source = api.put(bucket, "s", b"s").json()
    path = f"b/{bucket}/o/s/{verb}/b/{bucket}/o/x"
    for params, refused in cases(int(source["generation"]), 1):
        params = {name.replace("if", "ifSource", 1): value for name, value in params.items()}
        status = api.call("POST", path, params=params).status_code
        assert (params, status) == (params, refused or 200)


def test_preconditions_on_the_sources_of_a_compose(api: Api) -> None:
    bucket = api.bucket()
    generation = int(api.put(bucket, "s", b"s").json()["generation"])
    for wanted, status in ((generation, 200), (generation + 1, 412)):
        source = {"name": "s", "objectPreconditions": {"ifGenerationMatch": str(wanted)}}
        reply = api.call("POST", f"b/{bucket}/o/x/compose", json={"sourceObjects": [source]})
        assert reply.status_code == status


def test_precondition_on_a_bucket(api: Api) -> None:
    bucket = api.bucket()
    path = f"b/{bucket}"
    assert api.call("PATCH", path, params={"ifMetagenerationMatch": 1}, json={"labels": {"a": "b"}}).status_code == 200
    for method in ("GET", "PATCH", "PUT", "DELETE"):
        assert api.call(method, path, params={"ifMetagenerationMatch": 1}, json={}).status_code == 412
        assert api.call(method, path, params={"ifMetagenerationNotMatch": 2}, json={}).status_code == 304
    assert api.call("GET", path).json()["metageneration"] == "2"


def test_refusal_says_what_was_expected(api: Api) -> None:
    bucket = api.bucket()
    generation = api.put(bucket, "x", b"1").json()["generation"]
    error = api.put(bucket, "x", b"2", ifGenerationMatch=0).json()["error"]
    assert error["code"] == 412
    assert error["errors"] == [{"message": error["message"], "domain": "global", "reason": "conditionNotMet"}]
    assert f"ifGenerationMatch is 0, the current generation is {generation}" in error["message"]


def test_etag_is_the_real_services_encoding() -> None:
    # An object's etag as the documentation of the JSON API shows it: generation 1, metageneration 1.
    assert etag_of(1, 1) == "CAEQAQ=="
    assert etag_of(None, 1) == "CAE="


@pytest.mark.parametrize("round_number", range(3))
@pytest.mark.parametrize("kind", ["media", "multipart", "resumable"])
def test_one_of_twenty_racing_creators_wins(running: Running, kind: str, round_number: int) -> None:
    bucket = running.api.bucket()
    barrier = threading.Barrier(20)
    statuses: list[int] = []

    def create() -> None:
        with requests.Session() as session:
            racer = Api(running.api.url, session)
            barrier.wait(60)
            statuses.append(WRITES[kind](racer, bucket, {"ifGenerationMatch": 0}).status_code)

    threads = [threading.Thread(target=create) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(statuses) == [200] + [412] * 19
    assert [change.event for change in running.changes] == ["finalized"]
    assert len(running.blobs()) == 1


def test_racing_read_modify_writes_lose_nothing(running: Running) -> None:
    bucket = running.api.bucket()
    running.api.put(bucket, "counter", b"0")
    barrier = threading.Barrier(5)

    def increment() -> None:
        with requests.Session() as session:
            api = Api(running.api.url, session)
            barrier.wait(60)
            for _ in range(10):
                while True:
                    now = api.object("GET", bucket, "counter", params={"alt": "media"})
                    generation = now.headers["X-Goog-Generation"]
                    data = str(int(now.content) + 1).encode()
                    if api.put(bucket, "counter", data, ifGenerationMatch=generation).status_code == 200:
                        break

    threads = [threading.Thread(target=increment) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert running.api.object("GET", bucket, "counter", params={"alt": "media"}).content == b"50"


@dataclass
class Model:
    """A model of a bucket with one object name."""

    generation: int = 0
    metageneration: int = 0
    data: bytes = b""
    highest: int = 0

    def refusal(self, conditions: dict[str, int], creating: bool) -> int | None:
        if not self.generation and not creating:
            return 404
        match, not_match = conditions.get("ifGenerationMatch"), conditions.get("ifGenerationNotMatch")
        meta, meta_not = conditions.get("ifMetagenerationMatch"), conditions.get("ifMetagenerationNotMatch")
        if match not in (None, self.generation) or meta not in (None, self.metageneration):
            return 412
        if not self.generation:
            return None if not_match is None else 304
        return 304 if not_match == self.generation or meta_not == self.metageneration else None


# Conditions are drawn relative to the current state, so that half of them hold.
OFFSETS = st.sampled_from([None, None, 0, 0, 1, -1, "absolute"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "media", "patch", "delete"]), st.tuples(OFFSETS, OFFSETS, OFFSETS, OFFSETS)
    ),
    min_size=1,
    max_size=12,
)
NAMES = ("ifGenerationMatch", "ifGenerationNotMatch", "ifMetagenerationMatch", "ifMetagenerationNotMatch")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_sequence_of_conditional_calls_agrees_with_the_model(api: Api, steps: list[Any]) -> None:
    bucket, model = api.bucket(), Model()
    for verb, offsets in steps:
        current = (model.generation, model.generation, model.metageneration, model.metageneration)
        conditions = {
            name: 0 if offset == "absolute" else value + offset
            for name, value, offset in zip(NAMES, current, offsets, strict=True)
            if offset is not None
        }
        check_step(api, bucket, model, verb, conditions)


def check_step(api: Api, bucket: str, model: Model, verb: str, conditions: dict[str, int]) -> None:
    refused = model.refusal(conditions, creating=verb == "put")
    data = uuid.uuid4().bytes
    reply = api.put(bucket, "x", data, **conditions) if verb == "put" else OTHERS[verb](api, bucket, conditions)
    if refused:
        assert (verb, conditions, reply.status_code) == (verb, conditions, refused)
        return
    assert reply.status_code in (200, 204), reply.text
    if verb == "put":
        assert int(reply.json()["generation"]) > model.highest
        model.generation = model.highest = int(reply.json()["generation"])
        model.metageneration, model.data = 1, data
    elif verb == "patch":
        model.metageneration += 1
    elif verb == "media":
        assert reply.content == model.data
    elif verb == "delete":
        model.generation = model.metageneration = 0
    if verb in ("put", "get", "patch"):
        resource = reply.json()
        assert (int(resource["generation"]), int(resource["metageneration"])) == (
            model.generation,
            model.metageneration,
        )
