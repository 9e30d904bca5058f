"""Routes: templates, variables, JSON bodies and query parameters, over aiohttp and without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import requests
from aiohttp import web
from multidict import MultiDict

from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.kit.emulator import PassiveEmulator
from dropforge_local.emulators.kit.routing import Call, Reply, Route, Router, mount


def echo(call: Call) -> Any:
    return {"names": dict(call.names), "body": call.json(), "size": call.number("size"), "all": call.flag("all")}


async def create(call: Call) -> Reply:
    return Reply({"created": call.names["item"]}, 201, {"X-Created": "yes"})


ROUTES = [
    Route("POST", "/v1/{parent=projects/*}/items:search", echo),
    Route("GET", "/v1/{log.name=projects/*/logs/**}", echo),
    Route("PUT", "/v1/items/{item}", create),
]


class Echo(PassiveEmulator):
    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount(ROUTES)


@pytest.fixture
def url() -> Iterator[str]:
    with BackgroundServer(lambda: [Echo()]) as server:
        yield server.url


def test_handler_gets_names_body_and_parameters(url: str) -> None:
    answer = requests.post(f"{url}/v1/projects/p/items:search?size=3&all=True", json={"a": 1}, timeout=60)
    assert answer.json() == {"names": {"parent": "projects/p"}, "body": {"a": 1}, "size": 3, "all": True}


def test_two_stars_match_several_segments(url: str) -> None:
    assert requests.get(f"{url}/v1/projects/p/logs/a/b", timeout=60).json()["names"] == {
        "log__name": "projects/p/logs/a/b"
    }


def test_reply_sets_status_and_headers(url: str) -> None:
    answer = requests.put(f"{url}/v1/items/a%2Fb", timeout=60)
    assert (answer.status_code, answer.headers["X-Created"], answer.json()) == (201, "yes", {"created": "a/b"})


@pytest.mark.parametrize("path", ["/v1/projects/p/q/items:search", "/v1/projects/p:q/items:search", "/v2/items/a"])
def test_unknown_path_answers_501(url: str, path: str) -> None:
    assert requests.post(url + path, json={}, timeout=60).status_code == 501


@pytest.mark.parametrize(
    "request_", [{"data": "["}, {"data": "[]"}, {"params": {"size": "x"}}, {"params": {"all": "x"}}]
)
def test_malformed_request_is_an_invalid_argument(url: str, request_: dict[str, Any]) -> None:
    answer = requests.post(f"{url}/v1/projects/p/items:search", timeout=60, **request_)
    assert (answer.status_code, answer.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")


def test_router_unquotes_names_after_it_has_matched_the_path() -> None:
    call = Call("PUT", "/v1/items/a%2F%C3%BC", MultiDict(), {}, "http://here")
    match = Router(ROUTES).find(call)
    assert match is not None
    assert match[1].names == {"item": "a/ü"}
    assert Router(ROUTES).find(Call("GET", call.path, MultiDict(), {}, "http://here")) is None
