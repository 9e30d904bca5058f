"""Conditions, and who may do what under the bindings of a configuration."""

from __future__ import annotations

import pytest

from dropforge_local.base.errors import ApiError
from dropforge_local.base.identity import Identity
from dropforge_local.base.recording import FUNCTIONS, HEADER
from dropforge_local.iam import Callers, Policy, require
from dropforge_local.iam.conditions import Resource, Unsupported, compile_condition
from dropforge_local.iam.policy import PolicyError, current
from dropforge_local.iam.terraform import Binding, Configuration

OBJECT = "projects/_/buckets/b/objects/runs/r1/events/e.json"
ME, READ = "me@p.iam.gserviceaccount.com", "storage.objects.get"


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ('resource.name.startsWith("projects/_/buckets/b/objects/runs/")', True),
        ('resource.name.startsWith("projects/_/buckets/b/objects/models/")', False),
        ('!resource.name.endsWith(".txt") && resource.type == "storage.googleapis.com/Object"', True),
        ('resource.name.extract("/objects/runs/{run}/events/") != ""', True),
        ('resource.name.extract("/objects/runs/{run}/events/") == "r1"', True),
        ('resource.name.extract("/objects/runs/{run}/machine/") != ""', False),
        ('resource.name.extract("/events/{name}") == "e.json"', True),
        ("resource.type == 'x' || (resource.service == \"storage.googleapis.com\" && true)", True),
        ("api.getAttribute('prefix', 'none') == 'none'", True),
        ("resource.name", False),  # only `true` grants
    ],
)
def test_a_condition_holds(expression: str, holds: bool) -> None:
    resource = Resource(OBJECT, "storage.googleapis.com/Object", "storage.googleapis.com")
    assert compile_condition(expression)(resource) is holds


@pytest.mark.parametrize(
    "expression",
    [
        "request.time < timestamp('2030-01-01T00:00:00Z')",
        'resource.name.matches("x")',
        'resource.name.startsWith("x"',
        'resource.name.extract("no braces") != ""',
        "resource.name.startsWith()",
        "resource.matchTag('a', 'b')",
        "",
    ],
)
def test_an_expression_that_is_not_evaluated_denies_and_says_so(expression: str) -> None:
    with pytest.raises(Unsupported):
        compile_condition(expression)
    account = policy(Binding(f"serviceAccount:{ME}", "reader", "projects/_/buckets/b", expression or " ")).account(ME)
    assert not account.may(READ, OBJECT)
    with pytest.raises(ApiError, match="cannot evaluate the condition"):
        account.require(READ, OBJECT)


def policy(*bindings: Binding) -> Policy:
    return Policy(Configuration(bindings, {"reader": frozenset([READ])}, ()))


@pytest.mark.parametrize(
    ("on", "allowed", "denied"),
    [
        ("projects/_/buckets/b", OBJECT, "projects/_/buckets/bb/objects/x"),
        ("projects/_/buckets/*", "projects/_/buckets/data/objects/x", OBJECT),  # another binding names bucket b
        ("projects/_/buckets/*", "projects/_/buckets/bb", "projects/_/buckets/web-1/objects/x"),  # nor web-*
        ("projects/_/buckets/web-*", "projects/_/buckets/web-1/objects/x", "projects/_/buckets/we"),
        ("", OBJECT, None),
    ],
)
def test_a_binding_covers_its_resource_and_all_below_it(on: str, allowed: str, denied: str | None) -> None:
    others = [Binding("serviceAccount:x", "reader", f"projects/_/buckets/{name}") for name in ("b", "web-*")]
    account = policy(Binding(f"serviceAccount:{ME}", "reader", on), *others).account(ME)
    assert account.may(READ, allowed)
    assert denied is None or not account.may(READ, denied)
    assert not account.may("storage.objects.delete", allowed)


def test_a_role_that_is_not_known_is_refused() -> None:
    with pytest.raises(PolicyError, match="roles/owner"):
        policy(Binding(f"serviceAccount:{ME}", "roles/owner", ""))


IDENTITY = Identity("secret")
PROJECT_WIDE = policy(Binding(f"serviceAccount:{ME}", "reader", ""))
CALLERS = Callers(PROJECT_WIDE, IDENTITY, lambda caller: {"trainer": ME}.get(caller, f"{caller}@p"))


def bearer(caller: str) -> dict[str, str]:
    return {"authorization": f"Bearer {IDENTITY.token('OAuth2', 'scope', caller)}"}


@pytest.mark.parametrize(
    ("headers", "address", "email"),
    [
        ({}, "", None),
        (bearer(""), "", None),
        ({}, "trainer", ME),
        (bearer("trainer"), "", ME),
        (bearer("trainer"), "server", ME),  # a token says more than an address
        (bearer(""), "trainer", None),
        ({HEADER: "sweep"}, FUNCTIONS, "sweep@p"),
        (bearer(FUNCTIONS) | {HEADER: "sweep"}, "", "sweep@p"),
        ({HEADER: ""}, FUNCTIONS, "functions@p"),
        ({HEADER: "sweep"}, "trainer", ME),  # only functions name themselves
        ({HEADER: "sweep"}, "", None),
    ],
)
def test_a_request_acts_as_an_account(headers: dict[str, str], address: str, email: str | None) -> None:
    account = CALLERS.account(headers, address)
    assert (account and account.email) == email


@pytest.mark.parametrize("token", ["ya29.google", f"{IDENTITY.token('OAuth2', 'scope', 'trainer')[:-1]}x", ""])
def test_a_token_of_another_issuer_is_refused(token: str) -> None:
    with pytest.raises(ApiError) as caught:
        CALLERS.account({"authorization": f"Bearer {token}"}, "trainer")
    assert caught.value.http_status == 401


def test_only_the_owner_reaches_the_switches_of_the_stack() -> None:
    CALLERS.enter({}, "", "/_local/crash")
    with pytest.raises(ApiError, match="owner of the local stack"):
        CALLERS.enter({}, "trainer", "/_local/crash")


def test_require_asks_the_account_of_the_request() -> None:
    before = current.set(None)
    try:
        require("storage.buckets.delete", "projects/_/buckets/b")  # the owner
        CALLERS.enter({}, "trainer")
        require(READ, OBJECT)
        with pytest.raises(ApiError) as caught:
            require("storage.buckets.delete", "projects/_/buckets/b")
    finally:
        current.reset(before)
    assert caught.value.details[0]["metadata"] == {
        "permission": "storage.buckets.delete",
        "resource": "projects/_/buckets/b",
        "account": ME,
    }
