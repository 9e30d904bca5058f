"""Workflows and their revisions: deploy, read, delete."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import NotFound
from ..language.compiler import compile_source
from ..language.program import Program
from ..limits import Limits
from ..records import Revision, WorkflowRecord
from .core import Core
from .validation import check_environment, check_labels, check_name

PROGRAMS: Final = 256  # compiled revisions that stay in memory


class Programs:
    """Compiled revisions, the most recently used in memory."""

    def __init__(self) -> None:
        self._programs: OrderedDict[tuple[str, str], Program] = OrderedDict()

    def get(self, revision: Revision) -> Program:
        key = (revision.workflow, revision.revision_id)
        program = self._programs.get(key)
        if program is None:
            program, _ = compile_source(revision.source, Limits.lifted())  # `deploy` checked it against the limits
            self.put(revision, program)
        self._programs.move_to_end(key)
        return program

    def put(self, revision: Revision, program: Program) -> None:
        self._programs[(revision.workflow, revision.revision_id)] = program
        while len(self._programs) > PROGRAMS:
            self._programs.popitem(last=False)


class Workflows:
    """The deployed workflows of a database."""

    def __init__(self, core: Core, programs: Programs) -> None:
        self._core = core
        self._programs = programs

    def deploy(
        self,
        name: str,
        source: str,
        env: Mapping[str, str],
        labels: Mapping[str, str] | None,
        settings: Mapping[str, Any] | None,
        service_account: str,
    ) -> Revision:
        """Make `source` the current revision; keep the revision if everything that belongs to it is the same."""
        check_name(name)
        check_environment(env, self._core.limits)
        check_labels(labels or {}, self._core.limits)
        old = self._core.store.workflow(name)
        now = self._core.now()
        is_same = old is not None and _parts(old.revision) == (source, env, service_account)
        revision = old.revision if old is not None and is_same else self._compile(name, source, env, service_account)
        record = WorkflowRecord(
            name,
            revision,
            old.created if old else now,
            now,
            dict(labels) if labels is not None else (old.labels if old else {}),
            dict(settings) if settings is not None else (old.settings if old else {}),
        )
        with self._core.db.transaction():
            if not is_same:
                self._core.store.put_revision(revision)
            self._core.store.put_workflow(record)
        return revision

    def _compile(self, name: str, source: str, env: Mapping[str, str], service_account: str) -> Revision:
        program, _ = compile_source(source, self._core.limits)
        digest = hashlib.sha256(json.dumps([source, env, service_account], sort_keys=True).encode()).hexdigest()
        number = self._core.store.count_revisions(name) + 1
        id_ = f"{number:06d}-{digest[:3]}"
        revision = Revision(name, id_, source, env, self._core.now(), service_account)
        self._programs.put(revision, program)
        return revision

    def get(self, name: str) -> WorkflowRecord:
        record = self._core.store.workflow(name)
        if record is None:
            raise NotFound(f"workflow {name!r} not found")
        return record

    def list(self, parent: str) -> Sequence[WorkflowRecord]:
        return self._core.store.workflows(parent)

    def revisions(self, name: str) -> Sequence[Revision]:
        self.get(name)
        return self._core.store.revisions(name)


def _parts(revision: Revision) -> tuple[str, Mapping[str, str], str]:
    """What a revision consists of: the service makes a new one when the source or the service account changes."""
    return revision.source, revision.environment, revision.service_account
