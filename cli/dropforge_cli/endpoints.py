"""How a run's endpoint is called: its address for clients of the OpenAI API, the model's name, and the token."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.endpoints.record import EndpointRecord
from dropforge.endpoints.store import EndpointStore
from dropforge.run.record import Endpoint, Record, RunState
from dropforge.spec import JobSpec

from .deployment import Deployment
from .options import state_words
from .problems import CliError

PAGE = "docs/calling.md"


def call_lines(record: Record) -> list[str]:
    """Return how a run's endpoint is called, for people; empty without an endpoint that lives."""
    if record.endpoint is None or record.endpoint.ended:
        return []
    return [
        f"ask it: `dropforge chat {record.run}{state_words()}`",
        f"in a program: `dropforge snippet {record.run}{state_words()}`",
        f"its token: `{token_command(record.run)}`",
    ]


def token_command(name: str) -> str:
    """Return the command that prints the token of the endpoint of a run, or of a named endpoint."""
    return f"dropforge token {name}{state_words()}"


def endpoint_json(record: Record) -> dict[str, Any] | None:
    """Return a run's endpoint as JSON for programs, with what a client of the OpenAI API takes."""
    if record.endpoint is None:
        return None
    calling = {"base_url": record.endpoint.base_url, "token_command": token_command(record.run)}
    return {**record.endpoint.model_dump(mode="json"), **calling}


def named_of(store: EndpointStore, run: str) -> list[EndpointRecord]:
    """Return the named endpoints that have a revision with the model of a run; no retired ones."""
    records = [store.record(name) for name in store.names()]
    return [record for record in records if not record.retired and _revisions(record, run)]


def named_lines(record: EndpointRecord, run: str) -> list[str]:
    """Return what a named endpoint does with the model of a run, and how the endpoint is called, for people."""
    number = record.stable if record.stable in _revisions(record, run) else _revisions(record, run)[-1]
    lines = [f"endpoint {record.name} {record.base_url}".rstrip(), f"  revision {number} {_role(record, number)}"]
    if number == record.stable:
        own = next((f"/{each.name}" for each in record.adapters if each.run == run), "")
        called = f"{record.name}{own}{state_words()}"
        lines += [f"  ask it: `dropforge chat {called}`", f"  in a program: `dropforge snippet {called}`"]
    return lines


def named_json(record: EndpointRecord, run: str) -> dict[str, Any]:
    """Return what a named endpoint does with the model of a run, as JSON for programs."""
    numbers = _revisions(record, run)
    return {
        "name": record.name,
        "base_url": record.base_url,
        "revisions": numbers,
        "serves": record.stable in numbers,
        "token_command": token_command(record.name),
    }


def _revisions(record: EndpointRecord, run: str) -> list[int]:
    """The numbers of the revisions with the model of a run, also those of a shared endpoint that have its adapter."""
    return [
        revision.number
        for revision in record.revisions
        if any(each.run == run for each in revision.adapters) or (not revision.adapters and revision.run == run)
    ]


def _role(record: EndpointRecord, number: int) -> str:
    rollout = record.current
    if number == record.stable:
        return "serves"
    if rollout is not None and rollout.revision == number:
        return f"does not serve yet: {rollout.state}"
    return "is kept for a rollback" if number == record.previous else "does not serve"


def endpoint_of(record: Record) -> Endpoint:
    """Return the endpoint of a run. Raises CliError if there is none, or none any more."""
    endpoint, run = record.endpoint, record.run
    if endpoint is None and not record.state.is_terminal:
        raise CliError(f"{run} is {record.state} and has no endpoint yet", f"wait: `dropforge status {run} --watch`")
    if endpoint is None and record.state is RunState.SUCCEEDED:
        raise CliError(f"{run} was trained only: its spec has no endpoint", "set `serve` in the spec, and submit it")
    if endpoint is None:
        raise CliError(f"{run} is {record.state} and has no endpoint", f"why: `dropforge status {run}`")
    if endpoint.ended:
        when = f"{endpoint.ended:%Y-%m-%d %H:%M} UTC"
        hint = "submit its spec again with `--again`; a longer serve.ttl keeps an endpoint longer"
        raise CliError(f"the endpoint of {run} ended at {when}", hint)
    return endpoint


def token_of(deployment: Deployment, spec: JobSpec) -> str:
    """Return the token that requests to the endpoint of a spec bring; "" if it demands none. Raises CliError."""
    assert spec.serve is not None, "only a spec with an endpoint has a token"
    return _TOKENS[spec.serve.credential](deployment, spec)


def _identity_token(deployment: Deployment, spec: JobSpec) -> str:
    """gcloud has an identity token for a user; google-auth has not."""
    if deployment.stack is not None:
        return os.environ["DROPFORGE_EMULATOR_TOKEN"]
    command = ["gcloud", "auth", "print-identity-token"]
    if shutil.which(command[0]) is None:
        message = "the endpoint is on Cloud Run and demands an identity token, which only gcloud has for a user"
        raise CliError(message, "install gcloud (https://cloud.google.com/sdk/docs/install), then `gcloud auth login`")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        message = f"`{' '.join(command)}` did not answer in {TIMEOUT_SECONDS:.0f} s"
        raise CliError(message, "try it yourself; perhaps `gcloud auth login`") from None
    if done.returncode or not done.stdout.strip():
        why = done.stderr.strip() or "it printed nothing"
        raise CliError(f"`{' '.join(command)}` failed: {why}", "gcloud auth login")
    return done.stdout.strip()


def _api_key(deployment: Deployment, spec: JobSpec) -> str:
    from dropforge.platforms.serving import endpoint_key  # few commands need it, and it imports the platforms

    return endpoint_key(deployment.context.cloud, spec)


def _nothing(deployment: Deployment, spec: JobSpec) -> str:
    return ""


# By ServeSpec.credential.
_TOKENS: dict[str, Callable[[Deployment, JobSpec], str]] = {
    "identity_token": _identity_token,
    "api_key": _api_key,
    "none": _nothing,
}
