"""Who gets in: each test is an attack from another page, another host or an old link."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from dropforge_console.access import Access, Guard
from dropforge_console.passes import INVITATION, SECONDS, SESSION, Passes

HOST = "127.0.0.1:8899"


class Time:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def passes(tmp_path: Path, time: Time) -> Passes:
    return Passes(tmp_path / "console", time)


@pytest.fixture
def access(passes: Passes) -> Access:
    return Access(HOST, passes)


@pytest.fixture
def client(access: Access) -> Iterator[TestClient]:
    async def page(request: Request) -> PlainTextResponse:
        response = PlainTextResponse("secret")
        if request.url.path == "/enter":
            access.admit(response)
        return response

    routes = [Route(path, page, methods=["GET", "POST"]) for path in ("/runs", "/enter")]
    app = Starlette(routes=routes, middleware=[Middleware(Guard, gate=access)])
    with TestClient(app, base_url=f"http://{HOST}") as client:
        yield client


def test_a_browser_without_the_cookie_sees_nothing(client: TestClient) -> None:
    answer = client.get("/runs")
    assert answer.status_code == 401
    assert "secret" not in answer.text
    assert "dropforge open" in answer.text


def test_the_cookie_opens_the_pages(client: TestClient) -> None:
    client.post("/enter", headers={"sec-fetch-site": "same-origin"})
    assert client.get("/runs").text == "secret"


@pytest.mark.parametrize("value", ["", "x", "\N{LATIN SMALL LETTER E WITH ACUTE}", "a" * 4000])
def test_another_cookie_opens_nothing(client: TestClient, access: Access, value: str) -> None:
    header = f"{access.cookie}={value}".encode()
    assert client.get("/runs", headers={b"cookie": header}).status_code == 401


@pytest.mark.parametrize("host", ["attacker.example", "127.0.0.1", "127.0.0.1:1", "localhost:8899", f"{HOST}.x"])
def test_a_rebound_name_is_refused(client: TestClient, host: str) -> None:
    client.post("/enter", headers={"sec-fetch-site": "same-origin"})
    assert client.get("/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},  # another port of 127.0.0.1, which the browser sends the cookie to
        {"sec-fetch-site": "none"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "origin": f"http://{HOST}"},
    ],
)
def test_another_page_changes_nothing(client: TestClient, headers: dict[str, str]) -> None:
    client.post("/enter", headers={"sec-fetch-site": "same-origin"})
    assert client.post("/runs", headers=headers).status_code == 403


def test_an_older_browser_proves_its_page_by_the_origin(client: TestClient) -> None:
    client.post("/enter", headers={"origin": f"http://{HOST}"})
    assert client.post("/runs", headers={"origin": f"http://{HOST}"}).status_code == 200


def token_of(access: Access) -> str:
    return access.link().partition("token=")[2].partition("&")[0]


def test_a_link_opens_once(access: Access) -> None:
    token = token_of(access)
    assert access.spend(token)
    assert not access.spend(token)
    assert not access.spend("")


def test_a_link_is_valid_for_ten_minutes(access: Access, time: Time) -> None:
    token = token_of(access)
    time.seconds += SECONDS[INVITATION]
    assert not access.spend(token)


def test_a_link_opens_for_one_of_many_who_come_at_once(access: Access) -> None:
    tokens = [token_of(access) for _ in range(20)]
    with ThreadPoolExecutor(8) as pool:
        spent = [sum(pool.map(access.spend, [token] * 8)) for token in tokens]
    assert spent == [1] * 20


def test_a_session_survives_a_restart_and_ends_after_twelve_hours(
    client: TestClient, time: Time, tmp_path: Path
) -> None:
    client.post("/enter", headers={"sec-fetch-site": "same-origin"})
    token = next(iter(client.cookies.values()))
    restarted = Passes(tmp_path / "console", time)
    assert restarted.is_valid(SESSION, token)
    assert not restarted.is_valid(INVITATION, token)
    time.seconds += SECONDS[SESSION]
    assert client.get("/runs").status_code == 401


def test_the_files_of_tokens_open_nothing_and_do_not_pile_up(passes: Passes, time: Time, tmp_path: Path) -> None:
    directory = tmp_path / "console"
    for _ in range(50):
        passes.issue(INVITATION)
        time.seconds += SECONDS[INVITATION]
    files = list(directory.iterdir())
    assert len(files) == 1
    assert directory.stat().st_mode & 0o777 == 0o700
    assert files[0].stat().st_mode & 0o777 == 0o600
    time.seconds -= 1
    assert not passes.spend(INVITATION, files[0].name)
    assert not passes.spend(INVITATION, files[0].name.partition("-")[2])


def test_every_answer_forbids_scripts_of_others(client: TestClient) -> None:
    for answer in (client.get("/runs"), client.get("/runs", headers={"host": "x"}), client.get("/nowhere")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "no-store" in answer.headers["cache-control"]
