"""The output of ended containers: an emulator keeps that of the newest, as a cloud keeps logs for a time."""

from __future__ import annotations

from dropforge_local.base.db import Database

from ...containers.processes import Container, Runtime


def end(db: Database, table: str, runtime: Runtime, container: Container, kept: int) -> None:
    """Release an ended container and record its end in a table with `id`, `started` and `ended`.

    Forget the ended containers in the table, with their output, except the `kept` newest.
    """
    container.release()
    with db.transaction() as connection:
        connection.execute(f"UPDATE {table} SET ended = 1 WHERE id = ?", [container.id])
        old = db.rows(f"SELECT id FROM {table} WHERE ended ORDER BY started DESC LIMIT -1 OFFSET ?", [kept])
        connection.executemany(f"DELETE FROM {table} WHERE id = ?", [[row["id"]] for row in old])
    for row in old:
        runtime.forget(row["id"])
