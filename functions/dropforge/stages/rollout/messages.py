"""Messages that change a named endpoint: {"serve": {"run", "endpoint", "canary", "with", "again"}}, {"rollback":
endpoint}, {"retire": endpoint}, {"retire": {"endpoint", "model"}} for a model of a shared endpoint, {"extend":
{"endpoint", "ttl"}}, whose `ttl` null removes the expiry, and {"budget": {"endpoint", "usd", "per"}}, whose `usd` null
removes the budget.

A message that changes nothing is answered by a run event: a repeat would change nothing either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, InvalidSpec
from dropforge.base.redact import cut
from dropforge.context import Context
from dropforge.endpoints.record import Canary, Revision
from dropforge.run.events import Request
from dropforge.run.origin import bucket_and_run
from dropforge.run.record import Record
from dropforge.spec import JobSpec, parts
from dropforge.spec.kinds import ServeSpec
from dropforge.spec.parse import read_part
from dropforge.spec.parts import DURATION, not_an_endpoint
from dropforge.tell.run_events import answer_refused

from . import elsewhere, requests
from .canary import canary_of
from .requests import Refused

CHANGES = ("serve", "rollback", "retire", "extend", "budget")


def is_change(content: dict[str, Any]) -> bool:
    """Whether a message is one of CHANGES."""
    return len(content) == 1 and next(iter(content)) in CHANGES


def change_endpoint(context: Context, content: dict[str, Any], request: Request) -> None:
    """Carry out the change that a message requests. Raises CloudError if another delivery may succeed."""
    try:
        apply(context, content, request)
    except Refused as refused:
        ((change, arguments),) = content.items()
        endpoint = _text(arguments, "endpoint")
        context.log(refused.message, stage="rollout", severity="WARNING", endpoint=endpoint, change=change)
        rollout = names.rollout_id(request.topic, request.key)
        if problem := answer_refused(context, rollout, request, f"{change}: {refused.message}", refused.hint):
            raise CloudError(ErrorClass.TRANSIENT, problem) from None


def apply(context: Context, content: dict[str, Any], request: Request) -> None:
    """Carry out the change that a message requests. Raises Refused, and CloudError if another delivery may succeed."""
    ((change, arguments),) = content.items()
    rollout = names.rollout_id(request.topic, request.key)
    if not context.settings.rollout_workflow:
        raise Refused("this deployment has no workflow for rollouts", "`make deploy` of this version makes it")
    who, endpoint = request.who, _text(arguments, "endpoint")
    if change == "serve":
        if not names.is_endpoint_name(endpoint):
            raise Refused(not_an_endpoint(endpoint), "docs/endpoints.md#names")
        run = _text(arguments, "run")
        serve = _serve_of_another_deployment if elsewhere.is_elsewhere(context.settings, run) else _serve
        serve(context, arguments, endpoint, rollout, request)
    elif change == "rollback":
        requests.go_back(context, endpoint, rollout, who, request.topic)
    elif change == "retire" and (model := _text(arguments, "model")):
        requests.remove(context, endpoint, model, rollout, who, request.topic)
    elif change == "retire":
        requests.retire(context, endpoint, rollout, who, request.topic)
    elif change == "budget":
        requests.set_budget(context, endpoint, _budget(arguments), rollout, who, request.topic)
    else:
        requests.extend(context, endpoint, _ttl(arguments), request.topic)


def _serve(context: Context, arguments: dict[str, Any], endpoint: str, rollout: str, request: Request) -> None:
    """Put the model of a run of this deployment behind a name."""
    named = bucket_and_run(_text(arguments, "run"))
    record = _run(context, named[1] if named else _text(arguments, "run"), request.topic)
    if record.origin:
        raise Refused(
            f"run {record.run} is the copy of a model for one rollout: {record.origin}",
            "serve the model itself, by its gs:// address",
        )
    if "with" in arguments:
        raise Refused(
            "`with` is for the model of another deployment: the spec of a run says how it is served", elsewhere.PAGE
        )
    _check_new(context, arguments, endpoint, rollout, lambda revision: record.run in revision.runs)
    spec = context.store.spec(record.run)
    canary = _canary(context, arguments, spec, _named(context, f"the spec of run {record.run}", spec.serve))
    requests.put_behind(context, record, spec, endpoint, rollout, request.who, request.topic, canary)


def _serve_of_another_deployment(
    context: Context, arguments: dict[str, Any], endpoint: str, rollout: str, request: Request
) -> None:
    """Put a copy of the model of another deployment behind a name."""
    run, uri = names.copy_id(rollout), _text(arguments, "run")
    if (record := context.store.find(run)) is None:
        model = elsewhere.find_model(context, uri, endpoint, arguments.get("with", {}))
        _check_new(context, arguments, endpoint, rollout, partial(elsewhere.is_copy_of, context, model))
        canary = _canary(context, arguments, model.spec, _named(context, f"the spec of {uri}", model.spec.serve))
        requests.check_request(context, model.spec, request.topic, canary is not None)
        record = elsewhere.add_run(context, model, run, request)
    spec = context.store.spec(run)
    assert spec.serve is not None, "another spec is refused"
    canary = _canary(context, arguments, spec, spec.serve)
    requests.put_behind(context, record, spec, endpoint, rollout, request.who, request.topic, canary)


def _check_new(
    context: Context,
    arguments: dict[str, Any],
    endpoint: str,
    rollout: str,
    is_asked: Callable[[Revision], bool],
) -> None:
    """Raises Unchanged for a model that serves already, unless the message asks for it `again`."""
    if arguments.get("again") is not True:
        requests.check_new(context, endpoint, rollout, is_asked)


def _named(context: Context, what: str, serve: ServeSpec | None) -> ServeSpec:
    """The `serve` of a spec, whose model can get behind a name. Raises Refused."""
    if serve is None or not serve.takes_names:
        found = "has no `serve`" if serve is None else f"serves on {serve.type}"
        raise Refused(f"{what} {found}", "docs/endpoints.md lists where endpoints have names")
    if problem := serve.why_unnamed(context.settings):
        raise Refused(f"{what} serves on {serve.type}: {problem}", "docs/endpoints.md#tpu-vms")
    return serve


def _run(context: Context, run: str, topic: str) -> Record:
    """The run whose model is to be served. The run of another topic does not exist for a publisher."""
    record = context.store.find(run) if names.is_run_id(run) else None
    if record is None or (topic != record.topic and not context.settings.reaches_all(topic)):
        raise Refused(f"there is no run {cut(run, 60)!r}", "`dropforge runs` lists them")
    return record


def _text(arguments: Any, name: str) -> str:
    """A text of a message; a message about an endpoint alone is its name."""
    value = arguments if name == "endpoint" and isinstance(arguments, str) else None
    if isinstance(arguments, dict):
        value = arguments.get(name)
    return value if isinstance(value, str) else ""


def _canary(context: Context, arguments: dict[str, Any], spec: JobSpec, serve: ServeSpec) -> Canary | None:
    """The canary of a message: its own (null: none), or else that of the spec whose model it names."""
    if "canary" not in arguments:
        return canary_of(serve.canary)
    if arguments["canary"] is None:
        return None
    if serve.share:
        raise Refused("a shared endpoint has no canary: its other models would be split, too", requests.SHARING)
    if whole := serve.why_whole(spec, context.settings):
        raise Refused(whole, "`--canary none`: the model gets every request at once")
    try:
        return canary_of(read_part(parts.Canary, arguments["canary"], "serve", "canary"))
    except InvalidSpec as error:
        raise Refused(str(error.problems[0]), "docs/endpoints.md#canary") from None


def _ttl(arguments: Any) -> str | None:
    ttl = arguments.get("ttl", "") if isinstance(arguments, dict) else ""
    if ttl is not None and not (isinstance(ttl, str) and re.fullmatch(DURATION, ttl)):
        raise Refused(f"ttl is {cut(repr(ttl), 60)}; expected how long, such as 36h or 7d, or null for no expiry")
    return ttl


def _budget(arguments: Any) -> parts.Budget | None:
    """The budget of a message; None for `"usd": null`."""
    fields = (
        {key: value for key, value in arguments.items() if key != "endpoint"} if isinstance(arguments, dict) else {}
    )
    if "usd" in fields and fields["usd"] is None:
        return None
    try:
        return read_part(parts.Budget, fields, "serve", "budget")
    except InvalidSpec as error:
        hint = 'such as {"budget": {"endpoint": "NAME", "usd": 50, "per": "month"}}, or "usd": null for no budget'
        raise Refused(str(error.problems[0]), hint) from None
