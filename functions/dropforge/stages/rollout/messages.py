"""Messages that change a named endpoint (spec/request.py).

A message that changes nothing is answered by a run event: a repeat would change nothing either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.redact import cut
from dropforge.context import Context
from dropforge.endpoints.record import Canary, Revision
from dropforge.run.events import Request
from dropforge.run.origin import bucket_and_run
from dropforge.run.record import Record
from dropforge.spec import JobSpec
from dropforge.spec.job_spec import ServeSpec
from dropforge.spec.parts import not_an_endpoint
from dropforge.spec.request import (
    BudgetRequest,
    Change,
    RetireRequest,
    RollbackRequest,
    ServeRequest,
    Serving,
    WrongRequest,
    read_change,
)
from dropforge.tell.run_events import answer_refused

from . import elsewhere, requests
from .canary import canary_of
from .requests import Refused


def change_endpoint(context: Context, content: dict[str, Any], request: Request) -> None:
    """Carry out the change that a message requests. Raises CloudError if another delivery may succeed."""
    try:
        apply(context, content, request)
    except Refused as refused:
        ((change, arguments),) = content.items()
        endpoint = arguments.get("endpoint") if isinstance(arguments, dict) else arguments
        shown = cut(str(endpoint), 60)
        context.log(refused.message, stage="rollout", severity="WARNING", endpoint=shown, change=change)
        rollout = names.rollout_id(request.topic, request.key)
        if problem := answer_refused(context, rollout, request, f"{change}: {refused.message}", refused.hint):
            raise CloudError(ErrorClass.TRANSIENT, problem) from None


def apply(context: Context, content: dict[str, Any], request: Request) -> None:
    """Carry out the change that a message requests. Raises Refused, and CloudError if another delivery may succeed."""
    if not context.settings.rollout_workflow:
        raise Refused("this deployment has no workflow for rollouts", "`make deploy` of this version makes it")
    change, who, topic = read(content), request.who, request.topic
    rollout = names.rollout_id(topic, request.key)
    if isinstance(change, ServeRequest):
        _serve(context, change.serve, rollout, request)
    elif isinstance(change, RollbackRequest):
        requests.go_back(context, change.rollback, rollout, who, topic)
    elif isinstance(change, RetireRequest) and change.of.model:
        requests.remove(context, change.of.endpoint, change.of.model, rollout, who, topic)
    elif isinstance(change, RetireRequest):
        requests.retire(context, change.of.endpoint, rollout, who, topic)
    elif isinstance(change, BudgetRequest):
        requests.set_budget(context, change.budget.endpoint, change.amount, rollout, who, topic)
    else:
        requests.extend(context, change.extend.endpoint, change.extend.ttl, topic)


def read(content: dict[str, Any]) -> Change:
    """The change that a message requests. Raises Refused."""
    try:
        return read_change(content)
    except WrongRequest as wrong:
        raise Refused(wrong.message, wrong.hint) from None


def _serve(context: Context, wanted: Serving, rollout: str, request: Request) -> None:
    """Put a model behind a name: that of a run of this deployment, or a copy of one of another."""
    if not names.is_endpoint_name(wanted.endpoint):
        raise Refused(not_an_endpoint(wanted.endpoint), "docs/endpoints.md#names")
    serve = _serve_of_another_deployment if elsewhere.is_elsewhere(context.settings, wanted.run) else _serve_own
    serve(context, wanted, rollout, request)


def _serve_own(context: Context, wanted: Serving, rollout: str, request: Request) -> None:
    """Put the model of a run of this deployment behind a name."""
    named = bucket_and_run(wanted.run)
    record = _run(context, named[1] if named else wanted.run, request.topic)
    if record.origin:
        raise Refused(
            f"run {record.run} is the copy of a model for one rollout: {record.origin}",
            "serve the model itself, by its gs:// address",
        )
    if wanted.with_ is not None:
        raise Refused(
            "`with` is for the model of another deployment: the spec of a run says how it is served", elsewhere.PAGE
        )
    _check_new(context, wanted, rollout, lambda revision: record.run in revision.runs)
    spec = context.store.spec(record.run)
    canary = _canary(context, wanted, spec, _named(context, f"the spec of run {record.run}", spec.serve))
    requests.put_behind(context, record, spec, wanted.endpoint, rollout, request.who, request.topic, canary)


def _serve_of_another_deployment(context: Context, wanted: Serving, rollout: str, request: Request) -> None:
    """Put a copy of the model of another deployment behind a name."""
    run, uri = names.copy_id(rollout), wanted.run
    if (record := context.store.find(run)) is None:
        model = elsewhere.find_model(context, uri, wanted.endpoint, wanted.with_ or {})
        _check_new(context, wanted, rollout, partial(elsewhere.is_copy_of, context, model))
        canary = _canary(context, wanted, model.spec, _named(context, f"the spec of {uri}", model.spec.serve))
        requests.check_request(context, model.spec, request.topic, canary is not None)
        record = elsewhere.add_run(context, model, run, request)
    spec = context.store.spec(run)
    assert spec.serve is not None, "another spec is refused"
    canary = _canary(context, wanted, spec, spec.serve)
    requests.put_behind(context, record, spec, wanted.endpoint, rollout, request.who, request.topic, canary)


def _check_new(context: Context, wanted: Serving, rollout: str, is_asked: Callable[[Revision], bool]) -> None:
    """Raises Unchanged for a model that serves already, unless the message asks for it `again`."""
    if not wanted.again:
        requests.check_new(context, wanted.endpoint, rollout, is_asked)


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


def _canary(context: Context, wanted: Serving, spec: JobSpec, serve: ServeSpec) -> Canary | None:
    """The canary of a message: its own (null: none), or else that of the spec whose model it names."""
    if not wanted.has_canary:
        return canary_of(serve.canary)
    if wanted.canary is None:
        return None
    if serve.share:
        raise Refused("a shared endpoint has no canary: its other models would be split, too", requests.SHARING)
    if whole := serve.why_whole(spec, context.settings):
        raise Refused(whole, "`--canary none`: the model gets every request at once")
    return canary_of(wanted.canary)
