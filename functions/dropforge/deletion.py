"""Deletes the resources of a run, by its ledger. Several stages share this."""

from __future__ import annotations

from .base import names
from .base.errors import CloudError, ErrorClass
from .base.redact import cut
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
            is_gone = delete_resource(context, run, entry.kind, entry.name)
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


def delete_resource(context: Context, run: str, kind: str, name: str) -> bool:
    """Start, or continue, the deletion of a resource of a run; True once it was seen not to exist.

    Raises CloudError, also for a resource whose name is not the run's: a ledger or a label is wrong about it.
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

    def change(record: Record) -> Record:
        if record.endpoint is None or record.endpoint.ended:
            return record
        return record.model_copy(update={"endpoint": record.endpoint.model_copy(update={"ended": context.now()})})

    context.store.update(run, change)
