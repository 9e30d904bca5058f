"""Callback endpoints over real HTTP: who may call them, when, and the request that the workflow receives."""

from __future__ import annotations

import json
import time
from typing import Any

import requests
from tests.patience import PATIENCE_SECONDS

WAITER = """
main:
  params: [args]
  steps:
    - init:
        assign:
          - request: null
    - make:
        call: events.create_callback_endpoint
        args:
          http_callback_method: POST
        result: callback
    - tell:
        call: http.post
        args:
          url: ${args.peer + "/told"}
          body:
            url: ${callback.url}
    - loop:
        for:
          value: i
          range: [1, 2]
          steps:
            - wait:
                call: events.await_callback
                args:
                  callback: ${callback}
                  timeout: 30
                result: request
            - report:
                call: http.post
                args:
                  url: ${args.peer + "/got"}
                  body: ${request.http_request}
    - done:
        return: ${request.http_request.body}
"""
TOKEN = {"Authorization": "Bearer t"}


def start(served: Any, source: str = WAITER) -> tuple[Any, str]:
    workflow = served.deploy("waiter", source)
    argument = json.dumps({"peer": served.peer_url})
    record = served.call(lambda: served.engine.create_execution(workflow, argument))
    (told,) = eventually(lambda: served.peer.received("told"))
    return record, json.loads(told[3])["url"]


def eventually(condition: Any, seconds: float = PATIENCE_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition is not true after {seconds} s"
        time.sleep(0.005)
    return value


def test_an_execution_awaits_an_endpoint_twice(served: Any) -> None:
    record, url = start(served)
    assert url.startswith(f"{served.url}/v1/{record.name}/callbacks/")
    first = requests.post(url + "?a=1&b=2&b=3", json={"n": 1}, headers=TOKEN, timeout=60)
    assert first.status_code == 200
    eventually(lambda: len(served.peer.received("got")) == 1)
    got = json.loads(served.peer.received("got")[0][3])
    assert got["body"] == {"n": 1}
    assert got["method"] == "POST"
    assert got["query"] == {"a": "1", "b": ["2", "3"]}
    assert got["headers"]["Content-Type"] == "application/json"
    assert "Authorization" not in got["headers"]
    assert requests.post(url, data="plain", headers={**TOKEN, "Content-Type": "text/plain"}, timeout=60).ok
    done = served.call(lambda: served.engine.wait(record.name))
    assert done.result == '"plain"'
    assert requests.post(url, json={}, headers=TOKEN, timeout=60).status_code == 404


def test_a_sender_needs_a_bearer_token(served: Any) -> None:
    _, url = start(served)
    assert requests.post(url, json={}, timeout=60).status_code == 401
    assert requests.post(url, json={}, headers={"Authorization": "Basic eA=="}, timeout=60).status_code == 401
    assert requests.post(url, json={}, headers={"Authorization": "Bearer stranger"}, timeout=60).status_code == 403
    assert requests.put(url, json={}, headers=TOKEN, timeout=60).status_code == 405
    assert requests.post(url + "x", json={}, headers=TOKEN, timeout=60).status_code == 404


def test_an_endpoint_keeps_an_early_request_and_refuses_a_second(served: Any) -> None:
    source = WAITER.replace(
        "    - loop:\n", "    - nap:\n        call: sys.sleep\n        args: {seconds: 0.5}\n    - loop:\n"
    )
    record, url = start(served, source)
    assert requests.post(url, json=1, headers=TOKEN, timeout=60).status_code == 200
    assert requests.post(url, json=2, headers=TOKEN, timeout=60).status_code == 429
    eventually(lambda: served.peer.received("got"))
    assert requests.post(url, json=3, headers=TOKEN, timeout=60).status_code == 200
    assert served.call(lambda: served.engine.wait(record.name)).result == "3"


def test_a_wait_over_its_timeout_is_a_timeout_error(served: Any) -> None:
    source = """
main:
  steps:
    - make: {call: events.create_callback_endpoint, result: callback}
    - wait:
        try:
          call: events.await_callback
          args: {callback: "${callback}", timeout: 0.05}
        except:
          as: e
          steps:
            - back: {return: "${e}"}
"""
    record = served.run(source)
    assert json.loads(record.result)["tags"] == ["TimeoutError"]


def test_callbacks_are_listed(served: Any) -> None:
    record, url = start(served)
    ref = url.rsplit("/", 1)[1]

    def listed() -> Any:
        return served.call(lambda: served.engine.list_callbacks(record.name))

    eventually(lambda: listed() == [(ref, "POST", True)])
