"""The console behind Identity-Aware Proxy: who gets in, what each role may do, and whose name an action carries.

The application runs behind a socket. The keys of IAP are those of a server of this test, which signs real assertions.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import uvicorn
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import jwt
from google.auth.crypt import RSASigner
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.run.events import Request, request_message
from dropforge.run.record import Record, RunState
from dropforge.stages import submit
from dropforge.stages.cancel import cancel_requested
from dropforge.stages.rollout.requests import Refused, _check
from dropforge_console import actions
from dropforge_console.app import create_app
from dropforge_console.iap import ASSERTION, KEPT_SECONDS, PAUSE_SECONDS, Behind, IapAccess, Keys
from dropforge_console.people import Members, Role
from dropforge_console.server import host_of, listen

from ..deployments import Memory, context_with, settings_with
from ..endpoints.test_record import T0, endpoint, promoted
from ..stages.test_ceiling import document
from .iap import AUDIENCE, HOST, KeyServer, Signer, encoded, signed_part
from .test_views import record

SETTINGS = settings_with(specs_bucket="specs", operations_topic="operations", console_topic="console")
SPEC = json.dumps(document())
OWN, OF_TOPIC = "own-0123456789ab", "topic-0123456789ab"
PEOPLE = {Role.VIEWER: "vera@example.com", Role.SUBMITTER: "sam@example.com", Role.ADMIN: "ada@example.com"}


class Console:
    """A served console, its storage, and the messages that it has published: topic, content and attributes."""

    def __init__(self, address: str, storage: Memory, messages: list[tuple[str, Any, dict[str, str]]]) -> None:
        self.address, self.storage, self.messages = address, storage, messages

    def ask(self, method: str, path: str, assertion: str | None, **options: Any) -> requests.Response:
        headers = {"host": HOST, "origin": f"https://{HOST}", **options.pop("headers", {})}
        headers |= {} if assertion is None else {ASSERTION: assertion}
        url = f"http://{self.address}{path}"
        return requests.request(method, url, headers=headers, timeout=60, allow_redirects=False, **options)


@pytest.fixture(scope="module")
def key_server() -> Iterator[KeyServer]:
    server = KeyServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def signer(key_server: KeyServer) -> Signer:
    signer = Signer()
    key_server.keys[signer.key_id] = signer.pem
    return signer


@pytest.fixture(scope="module")
def console(key_server: KeyServer, signer: Signer) -> Iterator[Console]:
    """A console with a run of the specs bucket, a run of a topic, and an endpoint that can return to a model."""
    storage, messages = Memory(), list[tuple[str, Any, dict[str, str]]]()

    def publish(topic: str, data: bytes, *, timeout: float, **attributes: str) -> Any:
        messages.append((topic, json.loads(data), attributes))
        return SimpleNamespace(result=lambda _: "1")

    context = context_with(SETTINGS, storage=storage, publisher=SimpleNamespace(publish=publish))
    runs = (record((RunState.TRAINING, 1), run=OWN), record((RunState.TRAINING, 1), run=OF_TOPIC, topic="t"))
    for run in runs:
        put(storage, names.record_object(run.run), run.model_dump_json())
    put(storage, names.endpoint_object("e"), promoted(promoted(endpoint(), "a", 1, T0), "b", 2, T0).model_dump_json())
    behind = Behind(HOST, AUDIENCE, Members.of(["user:Sam@example.com"]), Members.of(["user:ada@example.com"]))
    app = create_app(context, IapAccess(behind, Keys(key_server.url, time.monotonic)))
    listener = listen(0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    with pytest.MonkeyPatch.context() as patch, listener:
        patch.setattr(actions, "shape_of", lambda *_: None)  # no hub
        thread.start()
        yield Console(host_of(listener), storage, messages)
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)


def put(storage: Memory, name: str, text: str) -> None:
    storage.blob(name).upload_from_string(text.encode(), if_generation_match=0)


def test_a_person_with_an_assertion_looks_and_the_keys_are_read_once(
    console: Console, signer: Signer, key_server: KeyServer
) -> None:
    for _ in range(5):
        answer = console.ask("GET", f"/runs/{OWN}", signer.assertion())
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert key_server.requests == 1


def wrong(signer: Signer) -> dict[str, tuple[str | None, str]]:
    """Assertions that prove nothing, and a word of the answer."""
    now, other = int(time.time()), Signer()
    head, claims = {"typ": "JWT", "kid": signer.key_id}, jwt.decode(signer.assertion(), verify=False)
    unsigned = signed_part({**head, "alg": "none"}, claims)
    by_hmac = signed_part({**head, "alg": "HS256"}, claims)
    mac = hmac.new(signer.pem.encode(), by_hmac.encode(), hashlib.sha256).digest()
    whole = signer.assertion()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    rsa_key = rsa.generate_private_key(65537, 2048).private_bytes(*form)
    by_rsa = jwt.encode(RSASigner.from_string(rsa_key, signer.key_id), claims).decode()
    changed = signed_part({**head, "alg": "ES256"}, {**claims, "email": "ada@example.com"})
    return {
        "missing": (None, "did not pass"),
        "empty": ("", "no JSON web token"),
        "wrong audience": (signer.assertion(aud=f"{AUDIENCE}-2"), "another service"),
        "audience of a backend service": (signer.assertion(aud="/projects/123/global/backendServices/1"), "another"),
        "list of audiences": (signer.assertion(aud=[AUDIENCE]), "another service"),
        "no audience": (signer.assertion(aud=None), "another service"),
        "wrong issuer": (signer.assertion(iss="https://accounts.google.com"), "issuer"),
        "no issuer": (signer.assertion(iss=None), "issuer"),
        "expired": (signer.assertion(iat=now - 900, exp=now - 60), "expired"),
        "no expiry": (signer.assertion(exp=None), "signature"),
        "expiry in words": (signer.assertion(exp="tomorrow"), "signature"),
        "not valid yet": (signer.assertion(iat=now + 300), "not valid yet"),
        "another key": (other.assertion(key_id=signer.key_id), "signature"),
        "an unknown key": (other.assertion(), "no key with its key id"),
        "no key id": (signed_part({"alg": "ES256"}, claims) + ".eA", "key id"),
        "no signature": (f"{unsigned}.", "not signed with ES256"),
        "HMAC with the public key": (f"{by_hmac}.{encoded(mac)}", "not signed with ES256"),
        "RSA": (by_rsa, "not signed with ES256"),
        "changed claims": (f"{changed}.{whole.rpartition('.')[2]}", "signature"),
        "cut": (whole[:-20], "signature"),
        "no e-mail": (signer.assertion(email=None), "e-mail"),
        "an e-mail with markup": (signer.assertion(email="<b>@example.com"), "e-mail"),
        "nested": ("[" * 3000 + ".e30.e30", "no JSON web token"),
        "huge": ("a" * 20_000, "more than"),
    }


def test_an_assertion_that_proves_nothing_opens_nothing(console: Console, signer: Signer) -> None:
    for what, (assertion, word) in wrong(signer).items():
        answer = console.ask("GET", "/runs", assertion)
        assert (answer.status_code, word in answer.text) == (401, True), f"{what}: {answer.text}"
        assert OWN not in answer.text
    assert console.ask("GET", "/static/console.js", None).status_code == 401


def test_the_headers_that_anybody_can_write_say_nothing(console: Console, signer: Signer) -> None:
    forged = {"x-goog-authenticated-user-email": "accounts.google.com:ada@example.com"}
    assert console.ask("GET", "/runs", None, headers=forged).status_code == 401
    assert console.ask("GET", "/new", signer.assertion(), headers=forged).status_code == 403


def test_an_address_of_another_identity_provider_is_not_that_of_a_google_account(
    console: Console, signer: Signer
) -> None:
    for prefix, code in (("", 200), ("accounts.google.com:", 200), ("securetoken.google.com/p/tenant:", 403)):
        assertion = signer.assertion(email=f"{prefix}{PEOPLE[Role.ADMIN]}")
        assert console.ask("GET", "/new", assertion).status_code == code
        assert console.ask("GET", "/runs", assertion).status_code == 200


@pytest.mark.parametrize("headers", [{"host": "attacker.example"}, {"host": f"{HOST}:443"}, {"host": "127.0.0.1"}])
def test_another_host_is_refused(console: Console, signer: Signer, headers: dict[str, str]) -> None:
    assert console.ask("GET", "/runs", signer.assertion(), headers=headers).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [{"sec-fetch-site": "same-site"}, {"sec-fetch-site": "cross-site"}, {"origin": f"http://{HOST}"}, {"origin": ""}],
)
def test_another_page_changes_nothing(console: Console, signer: Signer, headers: dict[str, str]) -> None:
    """IAP's own cookie travels with such a request, so the assertion is that of an admin."""
    before = len(console.messages)
    answer = console.ask("POST", f"/runs/{OWN}/cancel", signer.assertion(email=PEOPLE[Role.ADMIN]), headers=headers)
    assert (answer.status_code, len(console.messages)) == (403, before)


ACTIONS = {
    "drop": ("/new", Role.SUBMITTER),
    "check": ("/new", Role.SUBMITTER),
    "cancel": (f"/runs/{OWN}/cancel", Role.SUBMITTER),
    "cancel a run of a topic": (f"/runs/{OF_TOPIC}/cancel", Role.ADMIN),
    "rollback": ("/endpoints/e/rollback", Role.ADMIN),
    "retire": ("/endpoints/e/retire", Role.ADMIN),
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_role_does_what_it_may_and_nothing_else(console: Console, signer: Signer, action: str, role: Role) -> None:
    path, least = ACTIONS[action]
    messages, objects = len(console.messages), len(console.storage.objects)
    form = {"spec": SPEC, "do": action, "requested_by": "eve@example.com", "submitter": "eve@example.com"}
    answer = console.ask("POST", path, signer.assertion(email=PEOPLE[role]), data=form)
    new, dropped = console.messages[messages:], list(console.storage.objects)[objects:]
    if role < least:
        assert (answer.status_code, new, dropped) == (403, [], [])
        assert PEOPLE[role] in answer.text
        return
    assert answer.status_code == (200 if action == "check" else 303), answer.text
    if path == "/new":
        assert len(dropped) == (action == "drop")
        for name in dropped:
            assert name.startswith("specs/console/")
            assert console.storage.metadata[name] == {"submitter": PEOPLE[role]}
    else:
        [(topic, _, attributes)] = new
        assert (topic, attributes) == ("projects/x/topics/console", {"requested_by": PEOPLE[role]})


@pytest.mark.parametrize(
    ("path", "text", "least"),
    [
        ("/runs", 'href="/new"', Role.SUBMITTER),
        (f"/runs/{OWN}", "Cancel the run", Role.SUBMITTER),
        (f"/runs/{OF_TOPIC}", "Cancel the run", Role.ADMIN),
        ("/endpoints", "/endpoints/e/rollback", Role.ADMIN),
        ("/endpoints", "/endpoints/e/retire", Role.ADMIN),
    ],
)
def test_a_page_shows_what_the_role_may_do(console: Console, signer: Signer, path: str, text: str, least: Role) -> None:
    """The pages are kept for all viewers of a role: nobody sees those of another role."""
    for role in (*Role, *reversed(Role)):
        page = console.ask("GET", path, signer.assertion(email=PEOPLE[role])).text
        assert (text in page) == (role >= least), role
    assert console.ask("GET", "/new", signer.assertion()).status_code == 403


def test_an_action_of_the_console_carries_the_person_to_the_record(
    console: Console, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the console writes, the functions read: the object that it drops, and the message that it publishes."""
    sam = signer.assertion(email=PEOPLE[Role.SUBMITTER])
    location = console.ask("POST", "/new", sam, data={"spec": SPEC, "do": "drop"}).headers["location"]
    [name] = [name for name in console.storage.objects if names.run_id_of_object("specs", name, 1) in location]
    monkeypatch.setattr("dropforge.stages.admission.check", lambda *_: None)
    monkeypatch.setattr(submit, "start_execution", lambda *_: "e-1")
    publisher = SimpleNamespace(publish=lambda *_, **__: SimpleNamespace(result=lambda _: "1"))
    context = context_with(SETTINGS, storage=console.storage, publisher=publisher)
    accepted = submit.submit_object(context, "specs", name, "1", len(SPEC))
    assert (location, accepted.submitter) == (f"/runs/{accepted.run}", "sam@example.com")

    assert f"by {accepted.submitter}" in console.ask("GET", location, signer.assertion()).text
    before = len(console.messages)
    assert console.ask("POST", f"{location}/cancel", sam).status_code == 303
    [(topic, content, attributes)] = console.messages[before:]
    data = base64.b64encode(json.dumps(content).encode()).decode()
    event = {"message": {"data": data, "messageId": "1", "attributes": attributes}}
    _, request = request_message(event, f"//pubsub.googleapis.com/{topic}", SETTINGS.console_topic)
    cancel_requested(context, content["cancel"], request)
    cancelled: Record = context.store.record(accepted.run)
    assert cancelled.cancel_requested
    assert cancelled.cancelled_by == "sam@example.com"


@pytest.mark.parametrize(
    ("topic", "claimed", "believed"),
    [
        ("console", "ann@example.com", "ann@example.com"),
        ("operations", "ann@example.com", ""),
        ("requests", "ann@example.com", ""),
        ("console", "", ""),
        ("console", "ann", ""),
        ("console", "ann@example.com\nx: y", ""),
        ("console", f"{'a' * 300}@example.com", ""),
    ],
)
def test_only_the_consoles_topic_names_a_person(topic: str, claimed: str, believed: str) -> None:
    event = {"message": {"data": "", "messageId": "1", "attributes": {"requested_by": claimed}}}
    source = f"//pubsub.googleapis.com/projects/p/topics/{topic}"
    assert request_message(event, source, "console")[1].by == believed
    assert request_message(event, source, "")[1].by == "", "a deployment without a console believes nobody"


@pytest.mark.parametrize(
    ("name", "console_topic"),
    [("specs/a.json", "console"), ("specs/console/a.json", ""), ("specs/consoles/a.json", "c")],
)
def test_a_claim_in_the_metadata_counts_only_where_nobody_else_may_write(
    name: str, console_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Memory()
    blob = storage.blob(name)
    blob.metadata = {"submitter": "ann@example.com"}
    blob.upload_from_string(b"no spec", if_generation_match=0)
    publisher = SimpleNamespace(publish=lambda *_, **__: SimpleNamespace(result=lambda _: "1"))
    settings = settings_with(specs_bucket="specs", console_topic=console_topic)
    context = context_with(settings, storage=storage, publisher=publisher)
    assert submit.submit_object(context, "specs", name, "1", 7).submitter == ""


def test_the_specs_bucket_reaches_no_endpoint_of_a_topic_without_a_console() -> None:
    """A setting that is empty is no topic: the topic of a spec in the bucket is "", too."""
    context = context_with(settings_with(operations_topic="operations"))
    owned = endpoint().model_copy(update={"source": "requests-team"})
    with pytest.raises(Refused):
        _check(context, owned, "")
    for topic in ("requests-team", "operations"):
        _check(context, owned, topic)
    assert Request("operations", "k", "m").who == "topic operations message k"


class TestKeys:
    """The cache of the public keys, with a clock that the test turns."""

    @pytest.fixture
    def server(self) -> Iterator[KeyServer]:
        server = KeyServer()
        yield server
        server.close()

    def test_a_new_key_of_google_is_found_and_forged_key_ids_cause_no_requests(self, server: KeyServer) -> None:
        seconds = 0.0
        keys = Keys(server.url, lambda: seconds)
        server.keys = {"a": "A"}
        assert keys.find("a") == "A"
        server.keys = {"a": "A", "b": "B"}
        assert [keys.find(f"forged-{number}") for number in range(20)] == [None] * 20
        assert (keys.find("b"), server.requests) == (None, 1)
        seconds += PAUSE_SECONDS
        assert (keys.find("b"), server.requests) == ("B", 2)

    def test_a_key_that_google_removed_opens_nothing_after_an_hour(self, server: KeyServer) -> None:
        seconds = 0.0
        keys = Keys(server.url, lambda: seconds)
        server.keys = {"a": "A", "b": "B"}
        assert keys.find("a") == "A"
        server.keys = {"b": "B"}
        seconds += KEPT_SECONDS
        assert not keys.has("a")
        assert keys.find("a") is None

    def test_the_keys_stay_in_use_while_their_server_is_down(self, server: KeyServer) -> None:
        seconds = 0.0
        keys = Keys(server.url, lambda: seconds)
        server.keys = {"a": "A"}
        assert keys.find("a") == "A"
        server.is_up = False
        seconds += KEPT_SECONDS
        assert keys.find("a") == "A"
        server.is_up = True
        seconds += PAUSE_SECONDS
        assert (keys.find("a"), server.requests) == ("A", 3)


def test_without_keys_nobody_gets_in_and_the_answer_says_why(signer: Signer, key_server: KeyServer) -> None:
    behind = Behind(HOST, AUDIENCE, Members.of([]), Members.of([]))
    headers = {"host": HOST, ASSERTION: signer.assertion()}
    scope = {
        "type": "http",
        "method": "GET",
        "headers": [(name.encode(), text.encode()) for name, text in headers.items()],
    }
    refused = asyncio.run(IapAccess(behind, Keys(f"{key_server.url[:-11]}:1/", time.monotonic)).judge(scope))
    assert refused[0] == 503
    assert "cannot verify who you are" in str(refused[1])


@pytest.mark.parametrize(
    ("member", "email", "domain", "expected"),
    [
        ("user:ann@example.com", "Ann@Example.com", "", True),
        ("user:ann@example.com", "ann@example.com.evil.example", "", False),
        ("domain:example.com", "ann@example.com", "example.com", True),
        ("domain:example.com", "ann@example.com", "", False),  # a consumer's account with that address
        ("domain:example.com", "ann@sub.example.com", "sub.example.com", False),
        ("serviceAccount:ci@p.iam.gserviceaccount.com", "ci@p.iam.gserviceaccount.com", "", True),
    ],
)
def test_members_are_those_of_iam(member: str, email: str, domain: str, expected: bool) -> None:
    assert Members.of([member]).has(email, domain) is expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"URL": ""}, "DROPFORGE_CONSOLE_URL"),
        ({"URL": "http://x"}, "https://HOST"),
        ({"AUDIENCE": ""}, "DROPFORGE_CONSOLE_AUDIENCE"),
        ({"ADMINS": "group:a@example.com"}, "console_admins"),
        ({"SUBMITTERS": "ann@example.com"}, "console_submitters"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, str], problem: str) -> None:
    right = {"URL": f"https://{HOST}", "AUDIENCE": AUDIENCE, "SUBMITTERS": "domain:example.com", "ADMINS": ""}
    environment = {f"DROPFORGE_CONSOLE_{name}": value for name, value in right.items()}
    assert Behind.from_environment(environment).host == HOST
    with pytest.raises(ValueError, match=problem):
        Behind.from_environment(environment | {f"DROPFORGE_CONSOLE_{name}": value for name, value in change.items()})
