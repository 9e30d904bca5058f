"""Tells people and systems about a rollout: a notice of the run whose model it is about."""

from __future__ import annotations

from datetime import timedelta

from dropforge.base import names
from dropforge.context import Context
from dropforge.endpoints.budget import WARN_AT
from dropforge.endpoints.record import EndpointRecord, Rollout, RolloutState
from dropforge.run.record import Notice, Tone
from dropforge.tell.everybody import warn

TRIED_FOR = timedelta(minutes=2)  # after the end of a rollout: a channel that fails for longer gets no message


def tell(context: Context, record: EndpointRecord, rollout: Rollout) -> bool:
    """Send the notice about the present state of a rollout once; False if another try may succeed."""
    revision = record.find_revision(rollout.revision) or record.find_revision(record.last)
    if revision is None and not names.is_copy(rollout.run):
        return True  # nothing was ever put behind the name; the run tells why
    if rollout.kind == "resume" and not rollout.revision:
        return True  # the endpoint was not suspended any more
    name = rollout.run or (revision.run if revision else "")
    notice = notice_of(record, rollout)
    told = warn(context, context.store.record(name), context.store.spec(name), notice)
    is_late = rollout.ended is not None and context.now() - rollout.ended > TRIED_FOR
    return notice.key in told.notices or is_late


def warn_of_budget(context: Context, record: EndpointRecord) -> None:
    """Send the warning about the budget of an endpoint once, to the channels of the run whose model serves."""
    now = context.now()
    budget, spent = record.in_period(now).budget, record.spent(now)
    revision = record.serving or record.find_revision(record.last)
    if budget is None or spent is None or revision is None:
        return
    notice = Notice(
        f"budget-{record.name}-{budget.usd:g}-{budget.began:%Y%m%d%H%M%S}",
        f"endpoint {record.name} has used {WARN_AT} % of its budget",
        f"it has cost at most {spent:.2f} of {budget}; at 100 % it is suspended until "
        f"{budget.ends:%Y-%m-%d %H:%M} UTC. `dropforge budget {record.name} 100/month` sets another budget",
    )
    told = warn(context, context.store.record(revision.run), context.store.spec(revision.run), notice)
    if notice.key in told.notices:
        context.endpoints.update(record.name, lambda latest: latest.with_warning(budget.asked, now))


def notice_of(record: EndpointRecord, rollout: Rollout) -> Notice:
    """The notice about the present state of a rollout."""
    key, name = f"rollout-{rollout.id}-{rollout.state.lower()}", f"endpoint {record.name}"
    if rollout.kind == "remove":
        return _removal(record, rollout, key, name)
    revision = record.find_revision(rollout.revision)
    own = next((each.name for each in revision.adapters if each.run == rollout.run), "") if revision else ""
    called, model = (f"{record.name}/{own}", own) if own else (record.name, record.name)
    how = f"call it with `dropforge chat {called}` or `dropforge snippet {called}`"
    if rollout.state is RolloutState.PROMOTED:
        again = "again " if rollout.kind in ("rollback", "resume") else ""
        return Notice(
            key,
            f"serves {again}behind {name}",
            f"{record.base_url} answers with revision {rollout.revision}, as model {model}; {how}",
            Tone.SUCCESS,
        )
    if rollout.state is RolloutState.WATCHING and rollout.canary is not None:
        minutes = f"{rollout.canary.seconds / 60:g} minutes"
        text = f"for {minutes}, revision {rollout.revision} is watched; revision {record.stable} answers the rest"
        return Notice(key, f"is a canary of {name}: {rollout.canary.percent} % of the requests", text, Tone.NEWS)
    if rollout.state is RolloutState.SUSPENDED and record.budget is not None:
        text = (
            f"{record.base_url} answers nothing until {record.budget.ends:%Y-%m-%d %H:%M} UTC, or until its budget is "
            f"higher: `dropforge budget {record.name} 100/month`; its models are kept"
        )
        return Notice(key, f"does not serve: {name} has spent its budget of {record.budget}", text)
    if rollout.state is RolloutState.ROLLED_BACK and rollout.kind == "resume":
        why = rollout.error.message if rollout.error else "the rollout failed"
        return Notice(key, f"does not answer yet: {name} could not be started again", why)
    if rollout.state is RolloutState.ROLLED_BACK:
        why = rollout.error.message if rollout.error else "the rollout failed"
        stays = f"revision {record.stable} serves as before" if record.stable else "nothing serves behind the name"
        return Notice(key, f"was not put behind {name}", f"{why}; {stays}")
    if rollout.state is RolloutState.RETIRED:
        text = f"{record.url or name} does not answer any more"
        return Notice(key, f"no longer serves: {name} was retired", text, Tone.NEWS)
    stays = f"revision {record.stable} serves until then" if record.stable else "it is the first revision"
    text = f"revision {rollout.revision} is started and compared with its model; {stays}"
    return Notice(key, f"is being put behind {name}", text, Tone.NEWS)


def _removal(record: EndpointRecord, rollout: Rollout, key: str, name: str) -> Notice:
    """The notice about a model that is taken from a shared endpoint, for the run of the model."""
    if rollout.state is RolloutState.PROMOTED:
        text = f"requests for model {rollout.model} get 404; the other models of the endpoint answer as before"
        return Notice(key, f"no longer serves behind {name}", text, Tone.NEWS)
    if rollout.state is RolloutState.RETIRED:
        text = f"model {rollout.model} was the last one; {record.url or name} does not answer any more"
        return Notice(key, f"no longer serves: {name} was retired", text, Tone.NEWS)
    if rollout.state is RolloutState.ROLLED_BACK:
        why = rollout.error.message if rollout.error else "the rollout failed"
        return Notice(key, f"was not taken from {name}", f"{why}; revision {record.stable} serves as before")
    text = f"revision {rollout.revision} is started without model {rollout.model}, which serves until then"
    return Notice(key, f"is being taken from {name}", text, Tone.NEWS)
