"""Preflight on the page *New run*: could this spec run here?

Behind IAP, the function `preflight` answers, because the console's account may read neither quotas nor secrets. On a
person's machine, the console asks with the person's credentials, as `dropforge preflight` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dropforge.base.errors import DropforgeError
from dropforge.cloud.clients import Clients
from dropforge.context import Context
from dropforge.stages.answers import Checked, Finding
from dropforge.stages.preflight import preflight

from .asking import Unanswered
from .functions import Function

TIMEOUT_SECONDS = 60.0  # some requests for each placement, and the start of the function

Ask = Callable[[str], list[Finding]]


class Preflight(NamedTuple):
    """The answers about a spec; `trouble` says why there are none."""

    findings: list[Finding]
    trouble: str = ""


def here(context: Context) -> Ask:
    """Ask with the credentials of this process."""
    return lambda text: preflight(context, text).findings


def by_function(url: str, clients: Clients) -> Ask:
    """Ask the function `preflight` at `url`."""
    function = Function("preflight", url, clients, TIMEOUT_SECONDS)

    def ask(text: str) -> list[Finding]:
        answer = function({"spec": text}, "the spec")
        try:
            return Checked.model_validate({"findings": answer["findings"]}).findings
        except (KeyError, TypeError, ValueError) as error:
            raise Unanswered(f"the function preflight answered what is no list of findings: {error!r}") from error

    return ask


def asked(ask: Ask, text: str) -> Preflight:
    """The answers about a spec, or why there are none."""
    try:
        return Preflight(ask(text))
    except DropforgeError as error:
        return Preflight([], str(error))
