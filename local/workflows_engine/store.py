"""The engine's tables. Every method runs a few statements; its caller decides which calls form a transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from .database import Database
from .interpreter.waits import Wait
from .records import ExecutionRecord, Revision, WorkflowRecord
from .values import Value, decode_value, encode_value

PAGE: Final = 500  # executions that a listing reads at a time
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS wf_workflow (
    name TEXT PRIMARY KEY, revision TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL,
    labels TEXT NOT NULL, settings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS wf_revision (
    workflow TEXT NOT NULL, revision TEXT NOT NULL, source TEXT NOT NULL, environment TEXT NOT NULL,
    created REAL NOT NULL, service_account TEXT NOT NULL, PRIMARY KEY (workflow, revision)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS wf_execution (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, workflow TEXT NOT NULL, revision TEXT NOT NULL,
    state TEXT NOT NULL, argument TEXT NOT NULL, result TEXT, error TEXT, labels TEXT NOT NULL,
    settings TEXT NOT NULL, created REAL NOT NULL, started REAL, ended REAL, steps INTEGER NOT NULL DEFAULT 0,
    external_steps INTEGER NOT NULL DEFAULT 0, parent INTEGER, parent_thread INTEGER, parent_seq INTEGER,
    last_steps TEXT NOT NULL DEFAULT '[]');
CREATE INDEX IF NOT EXISTS wf_execution_workflow ON wf_execution (workflow, id);
CREATE INDEX IF NOT EXISTS wf_execution_live ON wf_execution (state, started) WHERE state IN ('ACTIVE', 'QUEUED');
CREATE INDEX IF NOT EXISTS wf_execution_parent ON wf_execution (parent) WHERE parent IS NOT NULL;
CREATE TABLE IF NOT EXISTS wf_state (execution INTEGER PRIMARY KEY, snapshot TEXT NOT NULL, runnable INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS wf_state_runnable ON wf_state (execution) WHERE runnable = 1;
CREATE TABLE IF NOT EXISTS wf_value (
    execution INTEGER NOT NULL, key INTEGER NOT NULL, text TEXT NOT NULL, PRIMARY KEY (execution, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS wf_wait (
    execution INTEGER NOT NULL, thread INTEGER NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, call TEXT NOT NULL,
    step TEXT NOT NULL, detail TEXT NOT NULL, due REAL, ref TEXT, sent INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (execution, thread)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS wf_wait_due ON wf_wait (due) WHERE due IS NOT NULL;
CREATE INDEX IF NOT EXISTS wf_wait_ref ON wf_wait (ref) WHERE ref IS NOT NULL;
CREATE TABLE IF NOT EXISTS wf_callback (
    ref TEXT PRIMARY KEY, execution INTEGER NOT NULL, method TEXT NOT NULL, request TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS wf_callback_execution ON wf_callback (execution);
CREATE TABLE IF NOT EXISTS wf_history (
    execution INTEGER NOT NULL, chunk INTEGER NOT NULL, events TEXT NOT NULL,
    PRIMARY KEY (execution, chunk)) WITHOUT ROWID;
"""


class Store:
    """Reads and writes the tables above. A read sees the open transaction."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._sql = db.connection
        with db.transaction():
            for statement in SCHEMA.split(";"):
                if statement.strip():
                    self._sql.execute(statement)

    # Workflows

    def workflow(self, name: str) -> WorkflowRecord | None:
        row = self._sql.execute(
            "SELECT revision, created, updated, labels, settings FROM wf_workflow WHERE name = ?", (name,)
        ).fetchone()
        if row is None:
            return None
        revision = self.revision(name, row[0])
        assert revision is not None
        return WorkflowRecord(name, revision, row[1], row[2], json.loads(row[3]), json.loads(row[4]))

    def workflows(self, parent: str) -> list[WorkflowRecord]:
        names = self._sql.execute(
            "SELECT name FROM wf_workflow WHERE name >= ? AND name < ? ORDER BY name",
            (f"{parent}/workflows/", f"{parent}/workflows0"),
        ).fetchall()
        return [record for (name,) in map(tuple, names) if (record := self.workflow(name)) is not None]

    def put_workflow(self, record: WorkflowRecord) -> None:
        self._sql.execute(
            "INSERT OR REPLACE INTO wf_workflow (name, revision, created, updated, labels, settings) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                record.name,
                record.revision.revision_id,
                record.created,
                record.updated,
                json.dumps(dict(record.labels)),
                json.dumps(dict(record.settings)),
            ),
        )

    def delete_workflow(self, name: str) -> None:
        """Delete a workflow with its revisions, and its executions with their rows."""
        executions = "IN (SELECT id FROM wf_execution WHERE workflow = ?)"
        for table in ("wf_history", *_STATE_TABLES):
            self._sql.execute(f"DELETE FROM {table} WHERE execution {executions}", (name,))
        for table in ("wf_execution", "wf_revision"):
            self._sql.execute(f"DELETE FROM {table} WHERE workflow = ?", (name,))
        self._sql.execute("DELETE FROM wf_workflow WHERE name = ?", (name,))

    def revision(self, workflow: str, revision: str) -> Revision | None:
        row = self._sql.execute(
            "SELECT source, environment, created, service_account FROM wf_revision WHERE workflow = ? AND revision = ?",
            (workflow, revision),
        ).fetchone()
        return Revision(workflow, revision, row[0], json.loads(row[1]), row[2], row[3]) if row else None

    def revisions(self, workflow: str) -> list[Revision]:
        rows = self._sql.execute(
            "SELECT revision, source, environment, created, service_account FROM wf_revision "
            "WHERE workflow = ? ORDER BY revision DESC",
            (workflow,),
        ).fetchall()
        return [Revision(workflow, row[0], row[1], json.loads(row[2]), row[3], row[4]) for row in rows]

    def put_revision(self, revision: Revision) -> None:
        self._sql.execute(
            "INSERT INTO wf_revision (workflow, revision, source, environment, created, service_account) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                revision.workflow,
                revision.revision_id,
                revision.source,
                json.dumps(dict(revision.environment)),
                revision.created,
                revision.service_account,
            ),
        )

    def count_revisions(self, workflow: str) -> int:
        row = self._sql.execute("SELECT max(revision) FROM wf_revision WHERE workflow = ?", (workflow,)).fetchone()
        return int(row[0].split("-")[0]) if row[0] else 0

    # Executions

    def insert_execution(self, record: ExecutionRecord, parent: tuple[int, int, int] | None) -> int:
        cursor = self._sql.execute(
            "INSERT INTO wf_execution (name, workflow, revision, state, argument, labels, settings, created, started, "
            "parent, parent_thread, parent_seq) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                record.name,
                record.workflow,
                record.revision_id,
                record.state,
                record.argument,
                json.dumps(dict(record.labels)),
                json.dumps(dict(record.settings)),
                record.created,
                record.started,
                *(parent or (None, None, None)),
            ),
        )
        assert cursor.lastrowid is not None
        if record.state == "ACTIVE":
            self._sql.execute("INSERT INTO wf_state VALUES (?, '', 1)", (cursor.lastrowid,))
        return cursor.lastrowid

    def execution(self, name: str) -> tuple[int, ExecutionRecord] | None:
        row = self._sql.execute(f"SELECT {_COLUMNS} FROM wf_execution WHERE name = ?", (name,)).fetchone()
        return (row[0], _record(row)) if row else None

    def execution_by_id(self, id_: int) -> ExecutionRecord | None:
        row = self._sql.execute(f"SELECT {_COLUMNS} FROM wf_execution WHERE id = ?", (id_,)).fetchone()
        return _record(row) if row else None

    def execution_name(self, id_: int) -> str:
        name: str = self._sql.execute("SELECT name FROM wf_execution WHERE id = ?", (id_,)).fetchone()[0]
        return name

    def executions(self, workflow: str) -> Iterator[tuple[int, ExecutionRecord]]:
        """A workflow's executions by row id, the newest first; read in pages, so that the caller may stop early."""
        last = 2**62
        while True:
            rows = self._sql.execute(
                f"SELECT {_COLUMNS} FROM wf_execution WHERE workflow = ? AND id < ? ORDER BY id DESC LIMIT {PAGE}",
                (workflow, last),
            ).fetchall()
            for row in rows:
                yield row[0], _record(row)
            if len(rows) < PAGE:
                return
            last = rows[-1][0]

    def children(self, parent: int, thread: int, seq: int) -> list[ExecutionRecord]:
        rows = self._sql.execute(
            f"SELECT {_COLUMNS} FROM wf_execution "
            "WHERE parent = ? AND parent_thread = ? AND parent_seq = ? ORDER BY id",
            (parent, thread, seq),
        ).fetchall()
        return [_record(row) for row in rows]

    def parent_of(self, id_: int) -> tuple[int, int, int] | None:
        row = self._sql.execute(
            "SELECT parent, parent_thread, parent_seq FROM wf_execution WHERE id = ?", (id_,)
        ).fetchone()
        return (row[0], row[1], row[2]) if row and row[0] is not None else None

    def count(self, state: str) -> int:
        row = self._sql.execute("SELECT count(*) FROM wf_execution WHERE state = ?", (state,)).fetchone()
        return int(row[0])

    def next_queued(self, limit: int) -> list[int]:
        rows = self._sql.execute(
            "SELECT id FROM wf_execution WHERE state = 'QUEUED' ORDER BY id LIMIT ?", (limit,)
        ).fetchall()
        return [row[0] for row in rows]

    def activate(self, id_: int, now: float) -> None:
        self._sql.execute("UPDATE wf_execution SET state = 'ACTIVE', started = ? WHERE id = ?", (now, id_))
        self._sql.execute("INSERT INTO wf_state VALUES (?, '', 1)", (id_,))

    def finish(
        self,
        id_: int,
        state: str,
        *,
        result: str | None,
        error: Mapping[str, Any] | None,
        now: float,
        steps: tuple[int, int] | None = None,
        last_steps: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Write the execution's end, unless it has one, and delete the rows of its state. Its history stays."""
        self._sql.execute(
            "UPDATE wf_execution SET state = ?, result = ?, error = ?, ended = ?, steps = coalesce(?, steps), "
            "external_steps = coalesce(?, external_steps), last_steps = ? "
            "WHERE id = ? AND state IN ('ACTIVE', 'QUEUED')",
            (
                state,
                result,
                json.dumps(error) if error else None,
                now,
                *(steps or (None, None)),
                json.dumps(last_steps),
                id_,
            ),
        )
        for table in _STATE_TABLES:
            self._sql.execute(f"DELETE FROM {table} WHERE execution = ?", (id_,))

    def prune(self, before: float) -> None:
        """Delete the executions that ended before a moment, with their history."""
        with self._db.transaction():
            self._sql.execute(
                "DELETE FROM wf_history WHERE execution IN (SELECT id FROM wf_execution WHERE ended < ?)", (before,)
            )
            self._sql.execute("DELETE FROM wf_execution WHERE ended < ?", (before,))

    def oldest_start(self) -> float | None:
        row = self._sql.execute("SELECT min(started) FROM wf_execution WHERE state = 'ACTIVE'").fetchone()
        return row[0] if row else None

    def started_before(self, moment: float) -> list[int]:
        rows = self._sql.execute(
            "SELECT id FROM wf_execution WHERE state = 'ACTIVE' AND started <= ?", (moment,)
        ).fetchall()
        return [row[0] for row in rows]

    # State

    def state(self, id_: int) -> tuple[str, dict[int, str]] | None:
        row = self._sql.execute("SELECT snapshot FROM wf_state WHERE execution = ?", (id_,)).fetchone()
        if row is None:
            return None
        values = self._sql.execute("SELECT key, text FROM wf_value WHERE execution = ?", (id_,)).fetchall()
        return row[0], {row[0]: row[1] for row in values}

    def save_state(
        self, id_: int, snapshot: str, added: Mapping[int, str], removed: Iterable[int], *, runnable: bool
    ) -> None:
        self._sql.execute("INSERT OR REPLACE INTO wf_state VALUES (?, ?, ?)", (id_, snapshot, runnable))
        if added:
            self._sql.executemany(
                "INSERT INTO wf_value VALUES (?, ?, ?)", [(id_, key, text) for key, text in added.items()]
            )
        if removed:
            self._sql.executemany(
                "DELETE FROM wf_value WHERE execution = ? AND key = ?", [(id_, key) for key in removed]
            )

    def runnable(self) -> list[int]:
        return [row[0] for row in self._sql.execute("SELECT execution FROM wf_state WHERE runnable = 1").fetchall()]

    # Waits

    def put_wait(self, id_: int, wait: Wait) -> None:
        self._sql.execute(
            "INSERT OR REPLACE INTO wf_wait VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            (
                id_,
                wait.thread,
                wait.seq,
                wait.kind,
                wait.call,
                wait.step,
                encode_value(wait.detail),
                wait.due,
                wait.ref,
            ),
        )

    def drop_wait(self, id_: int, thread: int, seq: int) -> None:
        self._sql.execute("DELETE FROM wf_wait WHERE execution = ? AND thread = ? AND seq = ?", (id_, thread, seq))

    def mark_sent(self, waits: Iterable[tuple[int, int]]) -> None:
        self._sql.executemany("UPDATE wf_wait SET sent = 1 WHERE execution = ? AND thread = ?", waits)

    def begin_polls(self, waits: Iterable[tuple[int, int]]) -> None:
        """Record that the engine performs these due waits now."""
        self._sql.executemany("UPDATE wf_wait SET due = NULL WHERE execution = ? AND thread = ?", waits)

    def pending_effects(self) -> list[tuple[int, Wait, bool]]:
        """(execution, wait, whether its request was marked as sent) of every wait that needs an effect now."""
        rows = self._sql.execute(
            f"SELECT {_WAIT_COLUMNS} FROM wf_wait WHERE kind IN ('http', 'connector') AND due IS NULL"
        ).fetchall()
        return [(row[0], _wait(row), bool(row[9])) for row in rows]

    def waits_for_executions(self) -> list[tuple[int, Wait]]:
        rows = self._sql.execute(f"SELECT {_WAIT_COLUMNS} FROM wf_wait WHERE kind = 'execution'").fetchall()
        return [(row[0], _wait(row)) for row in rows]

    def due(self, now: float, limit: int = 500) -> list[tuple[int, Wait]]:
        rows = self._sql.execute(
            f"SELECT {_WAIT_COLUMNS} FROM wf_wait WHERE due <= ? ORDER BY due, execution, thread LIMIT ?", (now, limit)
        ).fetchall()
        return [(row[0], _wait(row)) for row in rows]

    def next_due(self) -> float | None:
        row = self._sql.execute("SELECT min(due) FROM wf_wait WHERE due IS NOT NULL").fetchone()
        return row[0] if row else None

    def waiting_for(self, ref: str) -> tuple[int, Wait] | None:
        row = self._sql.execute(f"SELECT {_WAIT_COLUMNS} FROM wf_wait WHERE ref = ?", (ref,)).fetchone()
        return (row[0], _wait(row)) if row else None

    def waits(self, id_: int) -> list[Wait]:
        rows = self._sql.execute(f"SELECT {_WAIT_COLUMNS} FROM wf_wait WHERE execution = ?", (id_,)).fetchall()
        return [_wait(row) for row in rows]

    # Callbacks

    def put_callback(self, ref: str, id_: int, method: str) -> None:
        self._sql.execute("INSERT OR IGNORE INTO wf_callback VALUES (?, ?, ?, NULL)", (ref, id_, method))

    def callback(self, ref: str) -> tuple[int, str, Value] | None:
        """(execution, method, early request or None) of an endpoint."""
        row = self._sql.execute("SELECT execution, method, request FROM wf_callback WHERE ref = ?", (ref,)).fetchone()
        return (row[0], row[1], decode_value(row[2]) if row[2] is not None else None) if row else None

    def callbacks(self, id_: int) -> list[tuple[str, str]]:
        rows = self._sql.execute("SELECT ref, method FROM wf_callback WHERE execution = ? ORDER BY ref", (id_,))
        return [(row[0], row[1]) for row in rows.fetchall()]

    def fill_callback(self, ref: str, request: Value) -> None:
        text = None if request is None else encode_value(request)
        self._sql.execute("UPDATE wf_callback SET request = ? WHERE ref = ?", (text, ref))

    # History

    def add_history(self, id_: int, chunk: int, events: str) -> None:
        self._sql.execute("INSERT OR REPLACE INTO wf_history VALUES (?, ?, ?)", (id_, chunk, events))

    def history(self, id_: int) -> list[Any]:
        rows = self._sql.execute("SELECT events FROM wf_history WHERE execution = ? ORDER BY chunk", (id_,)).fetchall()
        return [event for row in rows for event in decode_value(row[0])]

    def next_chunk(self, id_: int) -> int:
        row = self._sql.execute("SELECT max(chunk) FROM wf_history WHERE execution = ?", (id_,)).fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def latest_time(self) -> float:
        """The latest time in the database; the engine's time never runs backwards over a restart."""
        row = self._sql.execute(
            "SELECT max(coalesce(ended, started, created)) FROM (SELECT ended, started, created "
            "FROM wf_execution ORDER BY id DESC LIMIT 100)"
        ).fetchone()
        return float(row[0]) if row and row[0] is not None else 0.0


_STATE_TABLES = ("wf_state", "wf_value", "wf_wait", "wf_callback")
_COLUMNS = (
    "id, name, workflow, revision, state, argument, result, error, labels, created, started, ended, steps, "
    "external_steps, settings, last_steps"
)
_WAIT_COLUMNS = "execution, thread, seq, kind, call, step, detail, due, ref, sent"


def _record(row: Any) -> ExecutionRecord:
    return ExecutionRecord(
        name=row[1],
        workflow=row[2],
        revision_id=row[3],
        state=row[4],
        argument=row[5],
        result=row[6],
        error=json.loads(row[7]) if row[7] else None,
        labels=json.loads(row[8]),
        created=row[9],
        started=row[10],
        ended=row[11],
        steps=row[12],
        external_steps=row[13],
        settings=json.loads(row[14]),
        current_steps=json.loads(row[15]),
    )


def _wait(row: Any) -> Wait:
    return Wait(row[1], row[2], row[3], row[4], decode_value(row[6]), row[7], row[8], row[5])
