"""Deletes the resources of a run, by its ledger. Several stages share this."""

from __future__ import annotations

from .base.errors import CloudError
from .context import Context
from .run.record import LedgerEntry, Record, ResourceState


def delete_remaining(context: Context, run: str, *, keep_endpoint: bool = False) -> list[LedgerEntry]:
    """Start, or continue, the deletion of every remaining resource of a run; return the entries that still exist.

    A resource that cannot be deleted does not stop the others: its CloudError is raised after them.
    """
    remaining, refusals = [], []
    for entry in context.store.ledger(run).remaining():
        if keep_endpoint and entry.is_endpoint(run):
            continue
        try:
            is_gone = delete_resource(context, entry.kind, entry.name)
        except CloudError as error:
            refusals.append(error)
            continue
        if is_gone:
            context.store.note(run, entry.name, ResourceState.GONE)
        else:
            remaining.append(entry)
    if refusals:
        raise refusals[0]
    return remaining


def delete_resource(context: Context, kind: str, name: str) -> bool:
    """Start, or continue, the deletion of a resource; True once it was seen not to exist. Raises CloudError."""
    return context.platforms.owner(kind).teardown(context.cloud, kind, name)


def end_endpoint(context: Context, run: str) -> bool:
    """Delete the endpoint of a finished run; True once the deletion is verified."""
    if delete_remaining(context, run):
        return False
    note_endpoint_ended(context, run)
    context.log("endpoint gone", stage="teardown", run=run)
    return True


def note_endpoint_ended(context: Context, run: str) -> None:
    """Note in the record when the endpoint ended; a noted time stays."""

    def change(record: Record) -> Record:
        if record.endpoint is None or record.endpoint.ended:
            return record
        return record.model_copy(update={"endpoint": record.endpoint.model_copy(update={"ended": context.now()})})

    context.store.update(run, change)
