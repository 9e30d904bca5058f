"""The console as its service on Cloud Run runs it: its own process and account, behind Identity-Aware Proxy.

The emulated IAM evaluates the bindings of terraform/ for each of its calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.console.iap import AUDIENCE, HOST, KeyServer, Signer
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.run.record import RunState
from dropforge_local.base.identity import CLOUD_PLATFORM, Identity
from dropforge_local.base.ports import free_port
from dropforge_local.base.recording import FUNCTIONS
from dropforge_local.stack import deployment
from dropforge_local.stack.functions_host import entry_points

from ..deployments import clients
from .conftest import User
from .targets import SERVES

pytestmark = pytest.mark.slow
SAM, ADA = "sam@example.com", "ada@example.com"
# Google's clients send no token to emulators of Cloud Storage and Pub/Sub: each request names its account.
AS_CONSOLE = """
import sys
from dropforge_local.base import recording
recording.caller.set("console")
recording.tell_callers()
from dropforge_console.__main__ import main
sys.exit(main())
"""


class Browser:
    """A browser that has passed IAP as some person."""

    def __init__(self, address: str, signer: Signer) -> None:
        self.address, self.signer = address, signer

    def ask(self, method: str, path: str, email: str, **form: str) -> requests.Response:
        return self._send(method, path, email, data=form)

    def question(self, email: str, of: str) -> requests.Response:
        return self._send("POST", "/ask", email, json={"of": of, "values": {"message": "a question"}})

    def _send(self, method: str, path: str, email: str, **content: Any) -> requests.Response:
        headers = {"host": HOST, "origin": f"https://{HOST}"}
        headers["x-goog-iap-jwt-assertion"] = self.signer.assertion(email=email)
        url = f"{self.address}{path}"
        return requests.request(method, url, headers=headers, timeout=60, allow_redirects=False, **content)

    def wait_for(self, path: str, *texts: str) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(text in (page := self.ask("GET", path, SAM).text) for text in texts):
            assert time.monotonic() < deadline, page
            time.sleep(0.1)
        return page


@pytest.fixture
def browser(user: User, tmp_path: Path) -> Iterator[Browser]:
    signer, port = Signer(), free_port(range(20000, 30000), set())
    with closing(KeyServer()) as server:
        yield from _browser(user, server, signer, port, tmp_path / "console.log")


def _browser(user: User, server: KeyServer, signer: Signer, port: int, log: Path) -> Iterator[Browser]:
    server.keys[signer.key_id] = signer.pem
    settings = {
        "PORT": str(port),
        "DROPFORGE_CONSOLE_URL": f"https://{HOST}",
        "DROPFORGE_CONSOLE_AUDIENCE": AUDIENCE,
        "DROPFORGE_CONSOLE_ASK_URL": f"{user.info.functions}ask",
        "DROPFORGE_CONSOLE_PREFLIGHT_URL": f"{user.info.functions}preflight",
        "DROPFORGE_CONSOLE_KEYS_URL": server.url,
        "DROPFORGE_CONSOLE_SUBMITTERS": f"user:{SAM}",
        "DROPFORGE_CONSOLE_ADMINS": f"user:{ADA}",
    }
    with started(environment_of_functions(user) | settings, log) as process:
        browser = Browser(f"http://127.0.0.1:{port}", signer)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            assert process.poll() is None, log.read_text()
            try:
                assert browser.ask("GET", "/runs", SAM).status_code == 200
                break
            except requests.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield browser


def environment_of_functions(user: User) -> dict[str, str]:
    """The environment of the functions' process, whose requests each name their account."""
    http, grpc = json.loads((user.state / "addresses.json").read_text())[FUNCTIONS]
    token = Identity((user.state / "identity").read_text()).token("OAuth2", CLOUD_PLATFORM, FUNCTIONS)
    addresses = deployment.environment(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}", token)
    return {**os.environ, **user.info.environment, **addresses}


@contextmanager
def started(environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        command = [sys.executable, "-P", "-c", AS_CONSOLE]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()


def test_people_drop_cancel_and_look_by_the_consoles_own_account(user: User, browser: Browser) -> None:
    spec = json.dumps(user.spec("hang"))
    assert browser.ask("POST", "/new", "vera@example.com", spec=spec, do="drop").status_code == 403
    dropped = browser.ask("POST", "/new", SAM, spec=spec, do="drop")
    assert dropped.status_code == 303, dropped.text
    run = dropped.headers["location"].removeprefix("/runs/")
    record = user.wait(run, "TRAINING")
    assert (record.submitter, "/specs/console/" in record.source) == (SAM, True)
    browser.wait_for(f"/runs/{run}", "Training", f"by {SAM}")

    page = browser.wait_for("/health", "compared", "Dead letters", "No alert of the project is open")
    for refused in ("cannot be listed", "answers 403", "Forbidden", "PermissionDenied"):  # the account may list it all
        assert refused not in page
    assert "dropforge-on-console-dead-letter" in page

    assert browser.ask("POST", f"/runs/{run}/cancel", SAM).status_code == 303
    cancelled = user.wait(run)
    assert (cancelled.state, cancelled.cancelled_by) == (RunState.CANCELLED, SAM)


def test_a_submitter_asks_a_model_by_an_account_that_may_call_no_other_service(user: User, browser: Browser) -> None:
    run = user.drop(user.spec("succeed", serve={"type": "cloud_run", **SERVES["cloud_run"]}))
    assert user.wait(run).state is RunState.SUCCEEDED
    browser.wait_for(f"/runs/{run}", "Ask the model")
    assert "Ask the model" not in browser.ask("GET", f"/runs/{run}", "vera@example.com").text
    assert browser.question("vera@example.com", run).status_code == 403
    answer = browser.question(SAM, run)
    assert '"text": "o"' in answer.text, answer.text
    assert answer.text.rstrip().endswith('{"end": "stop"}')

    identity, functions = Identity((user.state / "identity").read_text()), user.info.functions

    def called(function: str, token: str) -> requests.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return requests.post(functions + function, json={"of": run, "run": run}, headers=headers, timeout=60)

    lent = called("ask", identity.token("OIDC", f"{functions}ask", "console")).json()["token"]
    assert lent not in answer.text
    for function in entry_points():
        own = identity.token("OIDC", functions + function, "console")
        assert function in ("ask", "preflight") or called(function, own).status_code == 403
        assert called(function, lent).status_code == 403  # the token is for the endpoint alone
    user.publish(user.settings.operations_topic, json.dumps({"cancel": run}).encode())
    user.until(lambda: (found := user.store.record(run).endpoint) is not None and found.ended is not None)
    assert called("ask", identity.token("OIDC", f"{functions}ask", "console")).status_code == 404


def test_preflight_is_answered_by_a_function_whose_account_may_ask(user: User, browser: Browser) -> None:
    """The console's own account may look at no secret: it could not tell that this secret is missing."""
    spec = json.dumps(user.spec("succeed", secrets={"HF_TOKEN": "no-such-secret"}))
    assert browser.ask("POST", "/new", "vera@example.com", spec=spec, do="check").status_code == 403
    page = browser.ask("POST", "/new", SAM, spec=spec, do="check").text
    assert "the secret does not exist" in page
    assert "Preflight has no answer" not in page
    missing = browser.ask("POST", "/new", SAM, spec=json.dumps(user.spec("succeed")), do="check").text
    assert "the spec would be accepted" in missing


def test_a_submitter_of_the_bucket_cannot_drop_a_spec_in_the_name_of_another(user: User, browser: Browser) -> None:
    """Its account may write everywhere in the bucket but there; what it claims elsewhere is not believed."""
    blob = clients.storage().bucket(user.settings.specs_bucket).blob("specs/claims.json")
    blob.metadata = {names.SUBMITTER: ADA}
    blob.upload_from_string(json.dumps(user.spec("succeed")), if_generation_match=0)
    blob.reload()
    record = user.wait(names.run_id_of_object(user.settings.specs_bucket, blob.name, blob.generation))
    assert (record.state, record.submitter) == (RunState.SUCCEEDED, "")
    user.publish("dropforge-operations", json.dumps({"cancel": record.run}).encode(), requested_by=ADA)
    unchanged: Any = user.store.record(record.run)
    assert unchanged.cancelled_by == ""
