"""Tells people and systems about a rollout: a notice of the run whose model it is about."""

from __future__ import annotations

from datetime import timedelta

from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord, Rollout, RolloutState
from dropforge.run.record import Notice, Tone
from dropforge.tell.everybody import warn

TRIED_FOR = timedelta(minutes=2)  # after the end of a rollout: a channel that fails for longer gets no message


def tell(context: Context, record: EndpointRecord, rollout: Rollout) -> bool:
    """Send the notice about the present state of a rollout once; False if another try may succeed."""
    revision = record.find_revision(rollout.revision) or record.find_revision(record.last)
    if revision is None:
        return True  # nothing was ever put behind the name
    run = context.store.record(revision.run)
    notice = notice_of(record, rollout)
    told = warn(context, run, context.store.spec(revision.run), notice)
    is_late = rollout.ended is not None and context.now() - rollout.ended > TRIED_FOR
    return notice.key in told.notices or is_late


def notice_of(record: EndpointRecord, rollout: Rollout) -> Notice:
    """The notice about the present state of a rollout."""
    key, name = f"rollout-{rollout.id}-{rollout.state.lower()}", f"endpoint {record.name}"
    how = f"call it with `dropforge chat {record.name}` or `dropforge snippet {record.name}`"
    if rollout.state is RolloutState.PROMOTED:
        again = "again " if rollout.kind == "rollback" else ""
        return Notice(
            key,
            f"serves {again}behind {name}",
            f"{record.base_url} answers with revision {rollout.revision}, as model {record.name}; {how}",
            Tone.SUCCESS,
        )
    if rollout.state is RolloutState.WATCHING and rollout.canary is not None:
        minutes = f"{rollout.canary.seconds / 60:g} minutes"
        text = f"for {minutes}, revision {rollout.revision} is watched; revision {record.stable} answers the rest"
        return Notice(key, f"is a canary of {name}: {rollout.canary.percent} % of the requests", text, Tone.NEWS)
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
