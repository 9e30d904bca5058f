"""Tells people and systems about a rollout: a notice of the run whose model it is about."""

from __future__ import annotations

from datetime import datetime, timedelta

from dropforge.base import names
from dropforge.base.figures import usd
from dropforge.context import Context
from dropforge.endpoints.budget import WARN_AT, Budget
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
    notice = notice_of(record, rollout, context.now())
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
    notice = budget_notice(record, budget, spent, now)
    told = warn(context, context.store.record(revision.run), context.store.spec(revision.run), notice)
    if notice.key in told.notices:
        context.endpoints.update(record.name, lambda latest: latest.with_warning(budget.asked, now))


def budget_notice(record: EndpointRecord, budget: Budget, spent: float, now: datetime) -> Notice:
    """The notice about an endpoint that has used WARN_AT percent of its budget."""
    return Notice(
        f"budget-{record.name}-{budget.usd:g}-{budget.began:%Y%m%d%H%M%S}",
        f"endpoint {record.name} has used {WARN_AT} % of its budget",
        f"{usd(spent)} of {budget} are spent; at 100 % it is suspended until {budget.ends:%Y-%m-%d %H:%M} UTC",
        actions={"set another budget": f"dropforge budget {record.name} 100/month", **_end(record)},
        cost=_cost(record, now),
    )


def notice_of(record: EndpointRecord, rollout: Rollout, now: datetime) -> Notice:
    """The notice about the present state of a rollout."""
    key, name = f"rollout-{rollout.id}-{rollout.state.lower()}", f"endpoint {record.name}"
    notice = (_removal if rollout.kind == "remove" else _change)(record, rollout, key, name)
    return notice._replace(actions=_actions(record, rollout), cost=_cost(record, now))


def _change(record: EndpointRecord, rollout: Rollout, key: str, name: str) -> Notice:
    """The notice about a model that is put behind a name, and about the end of the name."""
    own = _adapter(record, rollout)
    if rollout.state is RolloutState.PROMOTED:
        again = "again " if rollout.kind in ("rollback", "resume") else ""
        return Notice(
            key,
            f"serves {again}behind {name}",
            f"{record.base_url} answers with revision {rollout.revision}, as model {own or record.name}",
            Tone.SUCCESS,
        )
    if rollout.state is RolloutState.WATCHING and rollout.canary is not None:
        minutes = f"{rollout.canary.seconds / 60:g} minutes"
        text = f"for {minutes}, revision {rollout.revision} is watched; revision {record.stable} answers the rest"
        return Notice(key, f"is a canary of {name}: {rollout.canary.percent} % of the requests", text, Tone.NEWS)
    if rollout.state is RolloutState.SUSPENDED and record.budget is not None:
        text = (
            f"{record.base_url} answers nothing until {record.budget.ends:%Y-%m-%d %H:%M} UTC, or until its budget is "
            f"higher; its models are kept"
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


def _adapter(record: EndpointRecord, rollout: Rollout) -> str:
    """The name of the model of a rollout behind a shared endpoint; "" for an endpoint with one model."""
    revision = record.find_revision(rollout.revision)
    return next((each.name for each in revision.adapters if each.run == rollout.run), "") if revision else ""


def _actions(record: EndpointRecord, rollout: Rollout) -> dict[str, str]:
    """What a person can do about a rollout in its state: commands to copy, by what they do."""
    name, own = record.name, _adapter(record, rollout)
    if rollout.state is RolloutState.RETIRED:
        return {"all endpoints": "dropforge endpoints --all"}
    if rollout.state is RolloutState.SUSPENDED:
        return {"set another budget": f"dropforge budget {name} 100/month", **_end(record)}
    if rollout.state is RolloutState.PROMOTED and rollout.kind != "remove":
        called = f"{name}/{own}" if own else name
        back = {"serve the model before": f"dropforge rollback {name}"} if record.previous else _end(record)
        return {"ask it": f"dropforge chat {called}", "a program that asks it": f"dropforge snippet {called}", **back}
    if rollout.state is RolloutState.WATCHING:
        return {"all endpoints": "dropforge endpoints", "end the canary": f"dropforge rollback {name}"}
    return {"all endpoints": "dropforge endpoints", **_end(record)}


def _end(record: EndpointRecord) -> dict[str, str]:
    return {"end the endpoint": f"dropforge retire {record.name}"}


def _cost(record: EndpointRecord, now: datetime) -> str:
    """What an endpoint costs per hour, as if all its instances ran, and what it has cost."""
    prices = [revision.usd_per_hour for revision in record.revisions if revision.paid_since]
    hourly = None if None in prices else sum(price or 0.0 for price in prices)
    spent = record.cost(now)
    if hourly is None or spent is None:
        return "price unknown"
    return f"endpoint {record.name} at most {usd(hourly)} an hour now, at most {usd(spent)} so far"
