"""The credentials of a container: the run's token for the runs bucket, and the account's for every other bucket."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.exceptions import RetryError
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import RefreshError

from dropforge.cloud.retrying import DEADLINE_VARIABLE, Retrying
from dropforge.cloud.run_access import RunCredentials

FUNCTION = "https://us-central1-p.cloudfunctions.net/dropforge-access"
ENVIRONMENT = {
    "DROPFORGE_RUNS_BUCKET": "runs",
    "DROPFORGE_ACCESS_URL": FUNCTION,
    "DROPFORGE_ACCESS_REQUEST": '{"run": "job-0123456789ab", "proof": "5"}',
}
API = "https://storage.googleapis.com"


class Google:
    """The metadata server and the function; `status` is the function's answer."""

    def __init__(self) -> None:
        self.status, self.asked, self.seconds, self.more = 200, list[str](), 3600, dict[str, Any]()

    def __call__(self, url: str, method: str = "GET", body: bytes = b"", headers: Any = None, **_: Any) -> Any:
        if "/identity" in url:
            claims = "eyJhbGciOiJub25lIn0.eyJleHAiOjQxMDI0NDQ4MDB9.AAAA"  # exp: 2100
            return SimpleNamespace(status=200, data=claims.encode(), headers={"content-type": "text/html"})
        assert (url, method, body.decode()) == (FUNCTION, "POST", ENVIRONMENT["DROPFORGE_ACCESS_REQUEST"])
        self.asked.append(headers["Authorization"])
        answer = {"access_token": f"token-{len(self.asked)}", "expires_in": self.seconds, **self.more}
        return SimpleNamespace(status=self.status, data=json.dumps(answer).encode(), headers={})


@pytest.fixture
def google() -> Google:
    return Google()


@pytest.fixture
def credentials() -> RunCredentials:
    passed = str(time.time() - 1)  # a deadline that is over: one try
    return RunCredentials(ENVIRONMENT, AnonymousCredentials(), Retrying({DEADLINE_VARIABLE: passed}))


def token(credentials: RunCredentials, google: Google, path: str) -> str:
    headers: dict[str, str] = {}
    credentials.before_request(google, "GET", API + path, headers)
    return headers.get("authorization", "")


def test_the_token_is_for_the_runs_bucket_alone(credentials: RunCredentials, google: Google) -> None:
    for path in (
        "/storage/v1/b/runs/o/models%2Fr",
        "/upload/storage/v1/b/runs/o?name=x",
        "/storage/v1/b/runs?alt=json",
    ):
        assert token(credentials, google, path) == "Bearer token-1"
    for path in ("/storage/v1/b/rows/o/runs", "/storage/v1/b/runs-2/o/x", "/download/storage/v1/b/rows/o/b%2Fruns"):
        assert token(credentials, google, path) == ""
    assert google.asked == ["Bearer eyJhbGciOiJub25lIn0.eyJleHAiOjQxMDI0NDQ4MDB9.AAAA"]


def test_a_token_is_renewed_before_it_ends(credentials: RunCredentials, google: Google) -> None:
    assert token(credentials, google, "/storage/v1/b/runs/o") == "Bearer token-1"
    credentials.expiry -= timedelta(seconds=3600 - 60)
    assert token(credentials, google, "/storage/v1/b/runs/o") == "Bearer token-2"
    credentials.expiry -= timedelta(seconds=3600 - 60)
    assert credentials.present(google)[0] == "token-3"


@pytest.mark.parametrize("spec", [{"name": "a"}, None])
def test_the_spec_comes_with_the_token(credentials: RunCredentials, google: Google, spec: Any) -> None:
    google.more = {"spec": spec} if spec else {}
    assert credentials.spec(google) == spec
    assert token(credentials, google, "/storage/v1/b/runs/o") == "Bearer token-1"
    assert credentials.spec(google) == spec
    assert len(google.asked) == 1


def test_the_threads_of_a_transfer_ask_once(credentials: RunCredentials, google: Google) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: token(credentials, google, "/storage/v1/b/runs/o"), range(32)))
    assert found == {"Bearer token-1"}


@pytest.mark.parametrize(
    ("status", "kind"), [(404, RefreshError), (403, RefreshError), (429, RetryError), (503, RetryError)]
)
def test_a_refusal_says_what_the_function_answered(
    credentials: RunCredentials, google: Google, status: int, kind: type[Exception]
) -> None:
    google.status = status
    with pytest.raises(kind, match=f"access at {FUNCTION} answered {status}"):
        token(credentials, google, "/storage/v1/b/runs/o")
