"""After a run has ended: gives its place to another run, writes its report, and tells everybody."""

from __future__ import annotations

from dropforge.base.errors import CloudError, Conflict
from dropforge.context import Context
from dropforge.run.record import Record
from dropforge.tell.everybody import conclude

from .places import leave


def finish(context: Context, record: Record) -> bool:
    """Do what follows the end of a run; False if something is left to do, and another try may succeed. Idempotent."""
    try:
        leave(context, record)
        conclude(context, record, context.store.spec(record.run))
    except (CloudError, Conflict):
        return False
    context.log(record.state.lower(), stage="notify", run=record.run)
    return True
