"""Channel GitHub: the status of the commit from which a spec was submitted.

https://docs.github.com/en/rest/commits/statuses#create-a-commit-status: the token needs "Commit statuses: write".
"""

from __future__ import annotations

import json
from typing import NamedTuple

from dropforge.base.errors import ErrorClass
from dropforge.base.redact import cut
from dropforge.base.settings import Settings
from dropforge.context import Context
from dropforge.run.record import RunState
from dropforge.spec import JobSpec

from .channel import Failure
from .news import News
from .outgoing import post
from .values import Unreadable, value_of

NAME = "github"
MAX_DESCRIPTION = 140
# The run or its spec caused these failures; the place where it ran caused the others.
_FAILURES = frozenset(
    {ErrorClass.CONFIG, ErrorClass.DATA, ErrorClass.CODE, ErrorClass.GATE, ErrorClass.PARITY, ErrorClass.OUT_OF_MEMORY,
     ErrorClass.DEADLINE, ErrorClass.BUDGET, ErrorClass.STUCK}
)  # fmt: skip


class Address(NamedTuple):
    """A commit, the name of its status, and the secret with a token that may set it."""

    repository: str
    sha: str
    token_secret: str
    context: str


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """The secret of a spec, by JSON pointer; empty without GitHub."""
    return {"/notify/github/token_secret": spec.notify.github.token_secret} if spec.notify.github else {}


def address_of(spec: JobSpec | None, settings: Settings) -> Address | None:
    """The spec's commit; a deployment has none of its own."""
    if spec is None or (github := spec.notify.github) is None:
        return None
    return Address(github.repository, github.sha, github.token_secret, f"dropforge/{spec.name}")


def send(context: Context, address: Address, news: News) -> Failure | None:
    """Set the commit's status; None on success, and for a notice, which changes no status. Never raises."""
    if news.is_notice:
        return None
    try:
        token = value_of(context.cloud, address.token_secret)
    except Unreadable as unreadable:
        return unreadable.failure
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        return Failure(f"secret {address.token_secret!r} does not hold a token", may_pass=False)
    base, emulator = context.cloud.clients.github()
    headers = {
        "Accept": "application/vnd.github+json",
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/json",
        "X-GitHub-Api-Version": "2022-11-28",
    }
    url = f"{base}/repos/{address.repository}/statuses/{address.sha}"
    place = f"the status of commit {address.sha[:12]} of {address.repository}, secret {address.token_secret!r}"
    return post(url, json.dumps(status_of(news, address.context)).encode(), headers, place, emulator)


def status_of(news: News, context: str) -> dict[str, str]:
    """The status for a message: its state, its description, and a link to the run."""
    why = f": {news.lines[0]}" if news.error_class is not None and news.lines else ""
    description = cut(f"{news.title}{why}", MAX_DESCRIPTION)
    return {"state": _state(news), "description": description, "context": context, "target_url": news.link}


def _state(news: News) -> str:
    if news.state is RunState.SUCCEEDED:
        return "success"
    if news.state is RunState.FAILED and news.error_class in _FAILURES:
        return "failure"
    return "error" if news.state.is_terminal else "pending"
