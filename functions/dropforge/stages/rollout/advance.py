"""Advances a rollout of a named endpoint. The revision that serves gets every request until the new one has shown that
it answers as its model does; after a failure it gets them again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, Conflict, ErrorClass, Malformed, NotFound
from dropforge.base.redact import cut
from dropforge.cloud.classify import something_may_exist
from dropforge.context import Context
from dropforge.endpoints import shared
from dropforge.endpoints.record import EndpointRecord, EndpointState, Revision, Rollout, RolloutState, Seen
from dropforge.endpoints.shared import Adapter
from dropforge.money.limits import serving_price
from dropforge.platforms.named import Candidate, Counted, Fence, Reached, RevisionGone, Share
from dropforge.platforms.serving import START_HINT, Deployment, Served, endpoint_key
from dropforge.platforms.training import Waits, launch_of
from dropforge.run.artifacts import Manifest, files_digest, read_manifest
from dropforge.run.origin import manifest_digest, read_origin
from dropforge.run.record import MAX_REASON, Parity, Record, RunError, RunState
from dropforge.run.seal import ROWS
from dropforge.run.starts import read_start
from dropforge.spec import JobSpec, seconds
from dropforge.stages.answers import Answer, Pending
from dropforge.stages.completion import completion_problem
from dropforge.stages.looks import next_look_since, next_turn
from dropforge.stages.parity import SHARE, compare
from dropforge.stages.waits import QUIET_SECONDS

from . import canary, copies
from .answers import Promoted, Retired, RolledBack, Superseded, Suspended
from .requests import SHARING, money_problem, nothing_before
from .telling import tell

COPYING = timedelta(hours=2)  # for a copy, which may go to another region
COMPARING = timedelta(minutes=30)  # for the parity seal, beyond serve.startup_timeout
LOOK_SECONDS = 2.0
END_SECONDS = 60.0  # how long the instances of an endpoint usually take to end; a VM takes some minutes
BUDGET_HINT = "the model is kept; `dropforge serve RUN --as NAME` puts it behind the name then"
DAMAGED_HINT = "serve the model of another run"
CHANGES = ("deploy", "remove")  # the kinds with a new revision
Step = Callable[[Context, EndpointRecord, Rollout], Answer | None]


def advance(context: Context, endpoint: str, rollout: str, execution: str) -> Answer:
    """Advance a rollout as far as it goes now.

    Raises NotFound for an unknown endpoint or rollout, CloudError if another try may succeed.
    """
    record = context.endpoints.update(endpoint, lambda latest: latest.claimed(rollout, execution))
    mine = record.rollout(rollout)
    if mine.execution != execution:
        return Superseded(execution=mine.execution)
    if not mine.state.is_terminal:
        if record.current != mine:
            return Pending(wait_seconds=next_turn((context.now() - mine.requested).total_seconds()))
        if (answer := _take_steps(context, record, rollout)) is not None:
            return answer
        record = context.endpoints.record(endpoint)
        mine = record.rollout(rollout)
    if not tell(context, record, mine):
        return Pending(wait_seconds=LOOK_SECONDS)
    return _ended(record, mine)


def _take_steps(context: Context, record: EndpointRecord, rollout: str) -> Answer | None:
    """Take one step after the other; None once the rollout has ended."""
    paid = record.paid
    if record.rollout(rollout).refused:
        asked = context.now()
        record = context.endpoints.update(record.name, lambda latest: latest.with_request(rollout, asked))
    while not (mine := record.rollout(rollout)).state.is_terminal:
        try:
            if (answer := _STEPS[mine.state](context, record, mine)) is not None:
                return answer
        except (CloudError, Malformed, NotFound) as found:
            error = _failure(found)
            _note_refusal(context, record, mine, error, record.paid - paid)
            if _may_pass(context, mine, error):
                raise
            if mine.state is RolloutState.UNDOING:
                _give_up(context, record, mine, error)
            else:
                _fail(context, record, mine, error.error_class, error.message, error.hint)
        record = context.endpoints.record(record.name)
    return None


def _failure(found: CloudError | Malformed | NotFound) -> CloudError:
    """Why a rollout fails. What a run has left may be damaged: another call finds it as it is."""
    return found if isinstance(found, CloudError) else CloudError(ErrorClass.CODE, str(found), DAMAGED_HINT)


def _note_refusal(context: Context, record: EndpointRecord, mine: Rollout, error: CloudError, began: set[int]) -> None:
    """Keep why a step that is tried again has failed, and that its revisions cost nothing if nothing of them exists.

    `began` are the revisions whose costs began in this call: no other call has requested instances of them.
    """
    is_request = mine.state in (RolloutState.DEPLOYING, RolloutState.CHECKING)
    refused = began if error.did_nothing and is_request else set()
    is_due = mine.started is not None and context.now() - mine.started >= timedelta(seconds=QUIET_SECONDS)
    reason = cut(error.message, MAX_REASON) if is_due and _may_pass(context, mine, error) else mine.wait_reason

    def change(latest: EndpointRecord) -> EndpointRecord:
        is_same = latest.rollout(mine.id).state is mine.state
        return latest.with_refusal(mine.id, refused, reason) if is_same else latest

    if change(record) is not record:
        context.endpoints.update(record.name, change)


def _begin(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Decide what the rollout changes. The endpoint may have changed since the request."""
    _check_cancel(context, mine)
    now = context.now()
    if record.state is EndpointState.RETIRED:
        _fail(context, record, mine, ErrorClass.CONFIG, f"endpoint {record.name} was retired", "choose another name")
    elif mine.kind == "retire":
        context.endpoints.update(record.name, lambda r: r.entered(mine.id, RolloutState.RETIRING, now))
    elif mine.kind == "remove" and (problem := _why_stays(record, mine)):
        _fail(context, record, mine, ErrorClass.CONFIG, problem)
    elif mine.kind == "remove" and not shared.minus(record.adapters, mine.model):  # the last one
        context.endpoints.update(record.name, lambda r: r.entered(mine.id, RolloutState.RETIRING, now))
    elif mine.kind == "suspend":
        context.endpoints.update(record.name, lambda r: r.suspends(mine.id, now))
    elif mine.kind == "resume" and not record.suspended and not is_lost(context, record):
        _fail(context, record, mine, ErrorClass.CONFIG, f"endpoint {record.name} is not suspended")
    elif mine.kind != "resume" and (problem := money_problem(record, now)):
        _fail(context, record, mine, ErrorClass.BUDGET, problem, BUDGET_HINT)
    elif names.is_copy(mine.run) and mine.kind == "deploy":
        context.endpoints.update(record.name, lambda r: r.copies(mine.id, now + COPYING, now))
    elif mine.kind in CHANGES:
        _begin_revision(context, record, mine)
    elif not (number := record.back(mine)):
        _fail(context, record, mine, ErrorClass.CONFIG, nothing_before(record))
    else:
        deadline = now + _patience(context.store.spec(record.revision(number).run))
        keeps = context.platforms.named(record.type).keeps_instances
        context.endpoints.update(record.name, lambda r: r.returns(mine.id, deadline, now, keeps))
    return None


def _copy(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Copy the model of another deployment, and prove the copy with the key of its run here."""
    copied = copies.advance(context, mine)
    if copied is not None:
        context.endpoints.update(record.name, lambda latest: latest.with_copied(mine.id, copied))
        _wait(context, record, mine, f"its model is being copied: {copied.path}")
        return Pending(wait_seconds=LOOK_SECONDS)  # the copy continues only while this function is called
    _begin_revision(context, record, mine)
    return None


def is_lost(context: Context, record: EndpointRecord) -> bool:
    """Whether the URL of an endpoint does not lead to the revision that serves: its machine has ended."""
    serving = record.serving
    server = context.platforms.named(record.type)
    return serving is not None and server.is_lost(context.cloud, record.service, serving.revision)


def _begin_revision(context: Context, record: EndpointRecord, mine: Rollout) -> None:
    """Add the revision to the record; the spec of a new model may have a budget for the endpoint."""
    revision, now = _without(record, mine) if mine.kind == "remove" else _revision(context, record, mine), context.now()
    spec = context.store.spec(revision.run)
    assert spec.serve is not None, "the request was refused otherwise"
    deadline, wanted = now + _patience(spec), spec.serve.budget if mine.kind == "deploy" else None
    if revision.usd_per_hour is None and (record.budget or wanted):
        message = (
            f"the budget of endpoint {record.name} cannot be enforced: the price of the model's machine is unknown"
        )
        _fail(context, record, mine, ErrorClass.CONFIG, message, "set serve.price_usd_per_hour")
        return

    def change(latest: EndpointRecord) -> EndpointRecord:
        return latest.with_budget_of_spec(wanted, now).began(mine.id, revision, deadline, now)

    record = context.endpoints.update(record.name, change)
    tell(context, record, record.rollout(mine.id))


def _deploy(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Start the revision without a share."""
    _check_cancel(context, mine)
    candidate = _candidate(context, record, record.revision(mine.revision), mine.id)
    found = context.platforms.named(record.type).deploy(
        context.cloud, candidate, _shares(record, record.stable, record.previous), _fence(context, record, mine)
    )
    if isinstance(found, Waits):
        return _wait(context, record, mine, found.reason, until=_start_ends(candidate.deployment.spec, mine))

    def change(latest: EndpointRecord) -> EndpointRecord:
        named = latest.with_revision(mine.revision, lambda r: evolve(r, revision=found.revision))
        return named.entered(mine.id, RolloutState.CHECKING, context.now())

    context.endpoints.update(record.name, change)
    return None


def _candidate(context: Context, record: EndpointRecord, revision: Revision, rollout: str) -> Candidate:
    run, spec = context.store.record(revision.run), context.store.spec(revision.run)
    launch = launch_of(run, spec, context.settings, key=context.store.key(revision.run))
    adapters = tuple(
        Served(each.name, each.run, each.digest, context.store.key(each.run)) for each in revision.adapters
    )
    deployment = Deployment(revision.run, spec, context.settings, context.now(), launch, record.name, adapters)
    return Candidate(rollout, revision.number, deployment, record.service)


def _check(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Ask the revision for a completion, which also starts its instance, and compare it with its model."""
    _check_cancel(context, mine)
    if mine.kind == "resume" and not _has_instances(context, record, mine):
        return _wait(context, record, mine, "the endpoint is being resumed")
    with something_may_exist():
        return _ask(context, record, mine)


def _ask(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Ask a revision that has instances, and compare it."""
    found = context.platforms.named(record.type).find(context.cloud, record.service, mine.revision)
    if found is None:
        hint = f"`dropforge serve RUN --as {record.name}` deploys its model again"
        raise CloudError(ErrorClass.CONFIG, f"revision {mine.revision} does not exist any more", hint)
    audience, revision = found.endpoint_url, record.revision(mine.revision)
    key = endpoint_key(context.cloud, context.store.spec(revision.run))
    for model in [each.name for each in revision.adapters] or [record.name]:
        if problem := completion_problem(context.cloud, found.url, model, key, audience):
            return _wait(context, record, mine, "the revision does not answer a completion yet", problem)
    compare_all = _compare_adapters if revision.adapters else _compare
    if mine.kind in CHANGES and (answer := compare_all(context, record, mine, found, key)) is not None:
        return answer
    _note_start(context, record, revision)
    if (wanted := mine.canary) is not None and record.stable:
        longest = timedelta(seconds=wanted.seconds) + canary.patience(wanted) + COMPARING
        context.endpoints.update(record.name, lambda r: r.watches(mine.id, *_times(context, longest)))
    else:  # nobody has asked for a canary, or there is no revision that it could be compared with
        context.endpoints.update(record.name, lambda r: r.shifts(mine.id, *_times(context, COMPARING)))
    return None


def _has_instances(context: Context, record: EndpointRecord, mine: Rollout) -> bool:
    """Let a suspended endpoint have instances again; whether it may have them."""
    kept = [revision for number in (record.stable, record.previous) if (revision := record.find_revision(number))]
    candidates = [_candidate(context, record, each, mine.id) for each in kept]
    server = context.platforms.named(record.type)
    return server.resume(context.cloud, record.service, candidates, _fence(context, record, mine))


def _compare(context: Context, record: EndpointRecord, mine: Rollout, found: Reached, key: str) -> Answer | None:
    """Compare the revision with the seal of its model. Raises CloudError if it differs."""
    known = record.revision(mine.revision).parity
    parity, error = compare(context, mine.run, known, found.url, record.name, key, found.endpoint_url)
    if parity != known:
        _note_parity(context, record, mine, parity)
    if error is not None:
        raise error
    return None if parity.is_over else _wait(context, record, mine, "its answers are being compared with the model's")


def _compare_adapters(
    context: Context, record: EndpointRecord, mine: Rollout, found: Reached, key: str
) -> Answer | None:
    """Compare each adapter of the revision with its own seal. Raises CloudError if one differs.

    An engine that has loaded an adapter may answer without it, or with another one.
    """
    until = context.now() + SHARE
    for adapter in record.revision(mine.revision).adapters:
        rows = shared.ROWS_AGAIN if adapter.sealed else ROWS
        parity, error = compare(
            context, adapter.run, adapter.parity, found.url, adapter.name, key, found.endpoint_url, rows
        )
        if parity != adapter.parity:
            _note_adapter(context, record, mine, adapter.name, parity)
        if error is not None:
            # The class PARITY would say of the run whose model is put there that its own model is unfit.
            is_own = adapter.run == mine.run or error.error_class is not ErrorClass.PARITY
            error_class = error.error_class if is_own else ErrorClass.CODE
            raise CloudError(error_class, f"model {adapter.name}: {error.message}", error.hint)
        if not parity.is_over or context.now() >= until:
            reason = f"the answers of model {adapter.name} are being compared with its adapter's"
            return _wait(context, record, mine, reason)
    return None


def _note_adapter(context: Context, record: EndpointRecord, mine: Rollout, name: str, parity: Parity) -> None:
    def change(latest: EndpointRecord) -> EndpointRecord:
        return latest.with_revision(mine.revision, lambda r: r.with_adapter(name, parity=parity))

    context.endpoints.update(record.name, change)


def _note_start(context: Context, record: EndpointRecord, revision: Revision) -> None:
    """Note how long the parts of the start of the revision's server took; a rollback notes no other start."""
    if revision.start:
        return
    start = read_start(context.cloud.clients.storage(), context.settings.runs_bucket, revision.run)
    if start:
        changed = {"start": start}
        context.endpoints.update(
            record.name, lambda latest: latest.with_revision(revision.number, lambda r: evolve(r, **changed))
        )


def _note_parity(context: Context, record: EndpointRecord, mine: Rollout, parity: Parity) -> None:
    def change(latest: EndpointRecord) -> EndpointRecord:
        return latest.with_revision(mine.revision, lambda r: evolve(r, parity=parity))

    context.endpoints.update(record.name, change)


def _watch(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Give the revision its share, until what the platform counts has decided."""
    assert mine.canary is not None, "CHECKING enters this state for canaries only"
    _check_cancel(context, mine)
    server = context.platforms.named(record.type)
    split = _split(record, mine.revision, mine.canary.percent)
    if not server.shift(context.cloud, record.service, split, _fence(context, record, mine)):
        return _wait(context, record, mine, "its share of the requests is being moved to the revision")
    if mine.watched is None:
        record = context.endpoints.update(record.name, lambda r: r.with_share(mine.id, context.now()))
        tell(context, record, record.rollout(mine.id))
        return None
    counts = server.counted(context.cloud, record.service, mine.watched)
    numbers = (mine.revision, record.stable)
    own, before = (counts.get(record.revision(number).revision, Counted()) for number in numbers)
    seen, lasted = Seen(canary=own, before=before), context.now() - mine.watched
    _note_seen(context, record, mine, seen)
    if not canary.has_passed(mine.canary, seen, lasted):
        return Pending(wait_seconds=next_look_since(mine.watched, context.now(), mine.canary.seconds))
    context.endpoints.update(record.name, lambda r: r.shifts(mine.id, *_times(context, COMPARING)))
    return None


def _note_seen(context: Context, record: EndpointRecord, mine: Rollout, seen: Seen) -> None:
    """Note what a canary has answered, and what it waits for."""
    reason = f"it is a canary; {canary.missing_requests(seen) or f'{seen.canary.requests} requests so far'}"

    def change(latest: EndpointRecord) -> EndpointRecord:
        found = latest.rollout(mine.id)
        if found.state is not RolloutState.WATCHING or found.seen == seen:
            return latest
        return latest.with_rollout(evolve(found, seen=seen, wait_reason=reason))

    context.endpoints.update(record.name, change)


def _shift(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Give the revision every request; the one before keeps its address, for a rollback."""
    server = context.platforms.named(record.type)
    other = record.stable if record.stable != mine.revision else record.previous
    shares = _shares(record, mine.revision, other)
    if not server.shift(context.cloud, record.service, shares, _fence(context, record, mine)):
        return _wait(context, record, mine, "the requests are being moved to the revision")
    if record.stable and (left := _drain_left(context, record, mine)) > 0:
        return Pending(wait_seconds=left)
    found = server.find(context.cloud, record.service, mine.revision)
    if found is None:
        raise CloudError(ErrorClass.CONFIG, f"revision {mine.revision} does not exist any more")
    url, expires, now, keeps = found.endpoint_url, _expiry(context, record, mine), context.now(), server.keeps_instances
    sealed = _sealed(context, record, mine)
    changed = context.endpoints.update(
        record.name, lambda r: sealed(r).promoted(mine.id, url, expires(r), now, keeps, server.keeps_revisions)
    )
    prune(context, changed)
    copies.drop(context, changed.copies_to_drop)
    return None


def _undo(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Give the revision before every request again. An endpoint that has none is deleted."""
    if not mine.revision:  # its model was being copied: it has changed nothing at the platform
        _undone(context, record, mine)
        return None
    if _is_alone(context, record, mine):
        return _end_alone(context, record, mine)
    if not _serves_again(context, record, mine):
        return Pending(wait_seconds=LOOK_SECONDS)
    if record.stable and (left := _answers_left(context, record, mine)) > 0:
        return Pending(wait_seconds=left)
    changed = _undone(context, record, mine)
    if record.stable:
        prune(context, changed)
    return None


def _is_alone(context: Context, record: EndpointRecord, mine: Rollout) -> bool:
    """Whether a rollout was to start the revision that serves anew: no machine of this revision has answered yet."""
    return record.stable == mine.revision and not context.platforms.named(record.type).keeps_revisions


def _end_alone(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """End what was started: no requests reach a machine that has not answered. The sweep begins another rollout."""
    server = context.platforms.named(record.type)
    if not server.suspend(context.cloud, record.service, [], _fence(context, record, mine)):
        return Pending(wait_seconds=LOOK_SECONDS)
    now = context.now()

    def ended(latest: EndpointRecord) -> EndpointRecord:
        if latest.rollout(mine.id).state.is_terminal:
            return latest  # this call was overtaken
        return latest.paying(set(), now).entered(mine.id, RolloutState.ROLLED_BACK, now)

    context.endpoints.update(record.name, ended)
    return None


def _serves_again(context: Context, record: EndpointRecord, mine: Rollout) -> bool:
    """Whether the revision before has every request, or nothing is left that could get any.

    If somebody has deleted the endpoint, this rollout made it again, with its own revision alone. That revision has
    failed, so the endpoint is deleted.
    """
    server = context.platforms.named(record.type)
    if record.stable:
        try:
            shares = _shares(record, record.stable, record.previous)
            return server.shift(context.cloud, record.service, shares, _fence(context, record, mine))
        except RevisionGone as gone:
            if gone.left is None or gone.left - {mine.id}:
                raise
            context.log(f"the endpoint is deleted: {gone.message}", stage="rollout", severity="WARNING")
    return server.delete(context.cloud, record.service)


def _drain_left(context: Context, record: EndpointRecord, mine: Rollout) -> float:
    """How many seconds the revision before must still answer, where the platform cannot tell when it has ended."""
    seconds_ = context.platforms.named(record.type).drain_seconds(context.cloud)
    if not seconds_ or record.stable == mine.revision:
        return 0.0
    moved = context.endpoints.update(record.name, lambda r: r.has_moved(mine.id, context.now())).rollout(mine.id).moved
    assert moved is not None, "it was noted"
    return seconds_ - (context.now() - moved).total_seconds()


def _answers_left(context: Context, record: EndpointRecord, mine: Rollout) -> float:
    """How many seconds a revision that has failed must still answer the requests that have reached it."""
    server = context.platforms.named(record.type)
    seconds_ = server.drain_seconds(context.cloud)
    if not seconds_ or mine.moved is None or server.find(context.cloud, record.service, mine.revision) is None:
        return 0.0
    changed = context.endpoints.update(record.name, lambda r: r.has_returned(mine.id, context.now()))
    returned = changed.rollout(mine.id).returned
    assert returned is not None, "it was noted"
    return seconds_ - (context.now() - returned).total_seconds()


def _suspend(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """End the instances of the endpoint."""
    shares = _shares(record, record.stable, 0)
    server = context.platforms.named(record.type)
    if not server.suspend(context.cloud, record.service, shares, _fence(context, record, mine)):
        return _next_look_at_end(context, mine)
    context.endpoints.update(record.name, lambda r: r.stopped(mine.id, context.now()))
    return None


def _retire(context: Context, record: EndpointRecord, mine: Rollout) -> Answer | None:
    """Delete the endpoint."""
    if not context.platforms.named(record.type).delete(context.cloud, record.service):
        return _next_look_at_end(context, mine)
    now = context.now()
    copies.drop(context, record.gone(mine.id, now).copies_to_drop)
    context.endpoints.update(record.name, lambda r: r.gone(mine.id, now))
    return None


def _next_look_at_end(context: Context, mine: Rollout) -> Pending:
    """Look again at instances that are ending since the rollout began."""
    assert mine.started is not None, "a rollout that has begun has a start"
    return Pending(wait_seconds=next_look_since(mine.started, context.now(), END_SECONDS))


_STEPS: dict[RolloutState, Step] = {
    RolloutState.QUEUED: _begin,
    RolloutState.COPYING: _copy,
    RolloutState.DEPLOYING: _deploy,
    RolloutState.CHECKING: _check,
    RolloutState.WATCHING: _watch,
    RolloutState.SHIFTING: _shift,
    RolloutState.UNDOING: _undo,
    RolloutState.SUSPENDING: _suspend,
    RolloutState.RETIRING: _retire,
}


def _may_pass(context: Context, mine: Rollout, error: CloudError) -> bool:
    """Whether the step is tried again. An end of instances is tried until it succeeds: what remains costs money."""
    if mine.state in (RolloutState.SUSPENDING, RolloutState.RETIRING):
        return True
    is_over = mine.deadline is not None and context.now() >= mine.deadline
    is_undone = mine.state is RolloutState.UNDOING
    return error.error_class is ErrorClass.TRANSIENT and (is_undone or not is_over)


def _give_up(context: Context, record: EndpointRecord, mine: Rollout, error: CloudError) -> None:
    """End a rollout that cannot be undone, so that the next one can: the platform refuses to move the requests."""
    message = f"the rollout could not be undone: {error.message}"
    context.log(message, stage="rollout", run=mine.run, severity="ERROR", endpoint=record.name, rollout=mine.id)
    _undone(context, record, mine)


def _undone(context: Context, record: EndpointRecord, mine: Rollout) -> EndpointRecord:
    keeps, now = context.platforms.named(record.type).keeps_instances, context.now()
    if mine.kind == "deploy" and names.is_copy(mine.run):
        copies.drop(context, [mine.run])
    return context.endpoints.update(record.name, lambda latest: latest.undone(mine.id, now, keeps))


def _fail(
    context: Context, record: EndpointRecord, mine: Rollout, error_class: ErrorClass, message: str, hint: str = ""
) -> EndpointRecord:
    """Note why a rollout fails; from then on it is undone. A rollout that ends otherwise meanwhile stays as it is."""
    error = RunError(error_class=error_class, message=message, hint=hint)
    context.log(message, stage="rollout", run=mine.run, severity="WARNING", endpoint=record.name, rollout=mine.id)
    return context.endpoints.update(record.name, lambda latest: latest.failed(mine.id, error, context.now()))


def _wait(
    context: Context,
    record: EndpointRecord,
    mine: Rollout,
    reason: str,
    problem: str = "",
    until: datetime | None = None,
) -> Pending:
    """Wait until a time, at most the rollout's deadline; then raise CloudError with the problem, or else the reason."""
    now, began = context.now(), mine.started or context.now()
    ends = min((each for each in (until, mine.deadline) if each is not None), default=None)
    if ends is not None and now >= ends:
        waited = (ends - began).total_seconds()
        what = f"revision {mine.revision}" if mine.revision else "the copy of the model"
        message = f"{what} was not ready after {waited:.0f} s: {problem or reason}"
        raise CloudError(ErrorClass.DEADLINE, message, START_HINT)
    kept = cut(reason, MAX_REASON)
    if kept != mine.wait_reason:

        def change(latest: EndpointRecord) -> EndpointRecord:
            found = latest.rollout(mine.id)
            if found.state.is_terminal:
                return latest
            return latest.with_rollout(evolve(found, wait_reason=kept))

        context.endpoints.update(record.name, change)
    return Pending(wait_seconds=next_look_since(began, now, context.platforms.start_seconds(record.type), ends))


def _fence(context: Context, record: EndpointRecord, mine: Rollout) -> Fence:
    """Refuse a change by a call that was suspended while another call has taken the rollout further."""

    def check() -> None:
        state = context.endpoints.record(record.name).rollout(mine.id).state
        if state is not mine.state:
            raise Conflict(f"rollout {mine.id} is {state}; this call began when it was {mine.state}")

    return check


def _shares(record: EndpointRecord, serving: int, other: int) -> list[Share]:
    """Every request to the revision `serving`. `other` keeps its address, for a rollback; 0: there is none."""
    found = [record.revision(number) for number in dict.fromkeys((serving, other)) if number]
    return [Share(each.revision, each.number, 100 if each.number == serving else 0) for each in found]


def _split(record: EndpointRecord, canary: int, percent: int) -> list[Share]:
    """A share for the canary, the rest for the revision that serves. The one before keeps its address."""
    others = _shares(record, record.stable, record.previous)
    rest = [share._replace(percent=100 - percent) if share.percent else share for share in others]
    return [*rest, Share(record.revision(canary).revision, canary, percent)]


def prune(context: Context, record: EndpointRecord) -> None:
    """Delete the revisions that no rollback can promote, but not that of a rollout that has begun meanwhile."""
    begun = record.current.revision if record.current is not None else 0
    last = begun - 1 if begun == record.last else record.last
    context.platforms.named(record.type).prune(context.cloud, record.service, record.kept, last)


def _expiry(context: Context, record: EndpointRecord, mine: Rollout) -> Callable[[EndpointRecord], datetime | None]:
    """The expiry of an endpoint after a promotion: a new model extends it by its ttl, and never shortens it."""
    if mine.kind != "deploy":
        return lambda latest: latest.expires
    serve = context.store.spec(mine.run).serve
    assert serve is not None, "the request was refused otherwise"
    until = context.now() + timedelta(seconds=seconds(serve.ttl))
    return lambda latest: None if latest.stable and latest.expires is None else max(latest.expires or until, until)


def _sealed(context: Context, record: EndpointRecord, mine: Rollout) -> Callable[[EndpointRecord], EndpointRecord]:
    """What a promotion notes of the adapters of a shared endpoint: they were compared, and how long a new one lives."""
    own = next((each for each in record.revision(mine.revision).adapters if each.run == mine.run), None)
    serve = context.store.spec(own.run).serve if own else None
    if own is None or serve is None:
        return lambda latest: latest
    until = context.now() + timedelta(seconds=seconds(serve.ttl))
    return lambda latest: latest.with_seals(mine.revision, own.name, until)


def _start_ends(spec: JobSpec, mine: Rollout) -> datetime | None:
    """When the platform must report the revision as ready."""
    assert spec.serve is not None, "the request was refused otherwise"
    return mine.started and mine.started + timedelta(seconds=seconds(spec.serve.startup_timeout))


def _patience(spec: JobSpec) -> timedelta:
    assert spec.serve is not None, "the request was refused otherwise"
    return timedelta(seconds=seconds(spec.serve.startup_timeout)) + COMPARING


def _revision(context: Context, record: EndpointRecord, mine: Rollout) -> Revision:
    """The revision of a rollout that deploys, with the digest of its model's manifest."""
    run, spec = context.store.record(mine.run), context.store.spec(mine.run)
    origin = read_origin(context.store, mine.run) if names.is_copy(mine.run) else None
    manifest = read_manifest(
        context.cloud.clients.storage(), context.settings.runs_bucket, mine.run, context.store.key(mine.run)
    )
    if manifest is None:
        raise CloudError(ErrorClass.CONFIG, f"the model of run {mine.run} does not exist any more")
    return Revision(
        number=record.last + 1,
        run=mine.run,
        digest=origin.digest if origin else manifest_digest(manifest),
        origin=origin.uri if origin else "",
        who=mine.who,
        requested=mine.requested,
        metrics=run.metrics,
        usd_per_hour=serving_price(spec).usd_per_hour,
        adapters=_with_adapter(record, run, spec, manifest) if record.base else [],
    )


def _with_adapter(record: EndpointRecord, run: Record, spec: JobSpec, manifest: Manifest) -> list[Adapter]:
    """The adapters of the revision that serves, and that of a run. Raises CloudError if the run's does not fit.

    The endpoint may have changed since the request, whose sender could not prove the manifest.
    """
    assert record.base is not None, "the caller has looked"
    assert spec.serve is not None, "the request was refused otherwise"
    problem = (
        shared.why_unfit(manifest)
        or shared.why_differs(record.base, shared.base_of(manifest, spec.serve))
        or shared.why_no_room(record.adapters, spec.name, run.topic, record.name)
    )
    if problem or manifest.adapter_path is None:
        message = f"endpoint {record.name} cannot serve the model of run {run.run}: {problem}"
        raise CloudError(ErrorClass.CONFIG, message, SHARING)
    digest = files_digest(manifest, manifest.adapter_path)
    return shared.plus(record.adapters, Adapter(name=spec.name, run=run.run, digest=digest, source=run.topic))


def _why_stays(record: EndpointRecord, mine: Rollout) -> str:
    """Why a model is not taken from a shared endpoint; "" if it is. The endpoint may have changed since the request."""
    found = next((adapter for adapter in record.adapters if adapter.name == mine.model), None)
    if found is None:
        return f"endpoint {record.name} does not serve model {mine.model} any more"
    if found.run != mine.run:
        return f"model {mine.model} is now that of run {found.run}"
    is_awaited = any(each.kind == "deploy" and not each.state.is_terminal for each in record.rollouts)
    if is_awaited and len(record.adapters) == 1:
        return f"model {mine.model} is the last one, and a rollout that waits adds another one; retire it after that"
    return ""


def _without(record: EndpointRecord, mine: Rollout) -> Revision:
    """The revision that serves, without one of its adapters. The newest of the others gives the base."""
    left = shared.minus(record.adapters, mine.model)
    of_run = next((each for each in record.revisions if each.run == left[-1].run), record.serving)
    assert of_run is not None, "an endpoint that serves nothing has no adapters"
    return Revision(
        number=record.last + 1,
        run=left[-1].run,
        digest=of_run.digest,
        who=mine.who,
        requested=mine.requested,
        metrics=of_run.metrics,
        usd_per_hour=of_run.usd_per_hour,
        adapters=left,
    )


def _times(context: Context, patience: timedelta) -> tuple[datetime, datetime]:
    """The deadline of what begins now, and now."""
    now = context.now()
    return now + patience, now


def _check_cancel(context: Context, mine: Rollout) -> None:
    """Raises CloudError if the rollout of a run is to end with it."""
    if mine.kind == "deploy" and _is_cancelled(context, mine):
        raise CloudError(ErrorClass.CANCELLED, f"run {mine.run} was cancelled", "the revision before serves")


def _is_cancelled(context: Context, mine: Rollout) -> bool:
    """Whether the run that put its own model behind the name was cancelled meanwhile."""
    if mine.id != mine.run:
        return False
    run = context.store.record(mine.run)
    return run.cancel_requested is not None and run.state is not RunState.SUCCEEDED


def _ended(record: EndpointRecord, mine: Rollout) -> Answer:
    """The answer about a rollout that has ended."""
    if mine.state is RolloutState.PROMOTED:
        return Promoted(url=record.url)
    if mine.state is RolloutState.SUSPENDED:
        return Suspended()
    return Retired() if mine.state is RolloutState.RETIRED else RolledBack(error=mine.error)
