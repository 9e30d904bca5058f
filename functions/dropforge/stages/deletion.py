"""Deletes the resources of a run, by its ledger. Several stages share this."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, ErrorClass, OverQuota
from dropforge.base.redact import cut
from dropforge.context import Context
from dropforge.run.record import Ledger, LedgerEntry, Record, ResourceState


class Deleted(NamedTuple):
    """The entries of a ledger that still exist, and the names of the resources that were seen not to exist."""

    remaining: list[LedgerEntry]
    gone: list[str]


def delete_remaining(context: Context, run: str, *, keep_endpoint: bool = False) -> list[LedgerEntry]:
    """Start, or continue, the deletion of every remaining resource of a run; return the entries that still exist.

    The ledger gets a note of those that are gone. Raises CloudError as `delete_all` does.
    """
    return note_gone(context, run, delete_all(context, context.store.ledger(run), keep_endpoint=keep_endpoint))


def delete_all(context: Context, ledger: Ledger, *, keep_endpoint: bool) -> Deleted:
    """Start, or continue, the deletion of every remaining resource in a ledger. The caller notes what is gone.

    A resource that cannot be deleted does not stop the others: its CloudError is raised after them; OverQuota only if
    every refusal is one.
    """
    run, deleted, refusals = ledger.run, Deleted([], []), []
    for entry in _to_delete(ledger, keep_endpoint):
        try:
            is_gone = delete_resource(context, run, entry.kind, entry.name)
        except CloudError as error:
            refusals.append(error)
            continue
        if is_gone:
            deleted.gone.append(entry.name)
        else:
            deleted.remaining.append(entry)
    if refusals:
        note_gone(context, run, deleted)
        raise min(refusals, key=lambda refusal: isinstance(refusal, OverQuota))
    return deleted


def _to_delete(ledger: Ledger, keep_endpoint: bool) -> list[LedgerEntry]:
    """The entries of each attempt, and of the endpoint, of which anything remains: also those that are noted as gone.

    A call that nobody waits for any more may have created a resource again after it was seen not to exist. What remains
    may be in it (a Job in its cluster), or may be used by it (the disk of a machine), and then it ends only with it.
    """
    run = ledger.run
    parts = {(entry.attempt, entry.is_endpoint(run)) for entry in ledger.remaining()}
    parts = {(attempt, is_endpoint) for attempt, is_endpoint in parts if not (keep_endpoint and is_endpoint)}
    return [entry for entry in ledger.entries if (entry.attempt, entry.is_endpoint(run)) in parts]


def note_gone(context: Context, run: str, deleted: Deleted) -> list[LedgerEntry]:
    """Note in the ledger what is gone; return the entries that still exist."""
    if deleted.gone:
        context.store.note(run, deleted.gone, ResourceState.GONE)
    return deleted.remaining


def delete_resource(context: Context, run: str, kind: str, name: str) -> bool:
    """Start, or continue, the deletion of a resource of a run; True once the cloud answers that it does not exist.

    Raises CloudError, also for a resource whose name belongs to another run: then a ledger or a label is wrong.
    """
    if not names.is_of_run(name, run):
        message = f"{cut(name, 300)!r} is not deleted: the names of the resources of run {run} begin with df-{run}-"
        raise CloudError(ErrorClass.CONFIG, message, "find out who wrote its name into the ledger, or set its labels")
    try:
        owner = context.platforms.owner(kind)
    except KeyError as error:
        raise CloudError(ErrorClass.CONFIG, f"{name} is not deleted: {error.args[0]}") from None
    return owner.teardown(context.cloud, kind, name)


def end_endpoint(context: Context, run: str) -> bool:
    """Delete the endpoint of a finished run; True once the deletion is verified."""
    if delete_remaining(context, run):
        return False
    note_endpoint_ended(context, run)
    context.log("endpoint gone", stage="teardown", run=run)
    return True


def note_endpoint_ended(context: Context, run: str) -> None:
    """Note in the record when the endpoint ended; a noted time stays."""
    context.store.update(run, lambda record: with_endpoint_ended(record, context.now()))


def with_endpoint_ended(record: Record, now: datetime) -> Record:
    """The record with the end of its endpoint, if it has an endpoint; a noted time stays."""
    if record.endpoint is None or record.endpoint.ended:
        return record
    return evolve(record, endpoint=evolve(record.endpoint, ended=now))
