"""Lists in pages, and watches: the changes since a revision, as a stream."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from .kinds import Kind
from .refusals import Refusal, bad_request
from .selectors import Selector
from .store import Change, Object, Store

LONGEST_WATCH_SECONDS = 1800.0
BOOKMARK_SECONDS = 60.0
INITIAL_END = "k8s.io/initial-events-end"


@dataclass(frozen=True)
class Scope:
    """The objects that a list or a watch selects."""

    kind: Kind
    namespace: str
    selector: Selector


@dataclass(frozen=True)
class Page:
    items: list[Object]
    revision: int
    following: str = ""
    remaining: int | None = None


def read_page(store: Store, scope: Scope, limit: int, token: str, version: str) -> Page:
    """A page of objects; all pages show the state at the first page. Refuses with 410 once that state is compacted."""
    revision, start = (store.revision(), None) if not token else _read_token(token)
    if token and revision < store.compacted():
        raise expired(revision, store.compacted(), "The provided continue parameter is too old")
    if version not in ("", "0") and (wanted := read_version(version)) > store.revision():
        raise _too_new(wanted, store.revision())
    items = store.items(scope.kind, scope.namespace, at=revision if token else None)
    items = [item for item in items if start is None or _key(item) > start]
    items = [item for item in items if scope.selector.matches(scope.kind, item)]
    if not limit or len(items) <= limit:
        return Page(items, revision)
    remaining = None if scope.selector else len(items) - limit
    return Page(items[:limit], revision, _write_token(revision, _key(items[limit - 1])), remaining)


async def watch(
    store: Store, scope: Scope, version: str, timeout_seconds: float, *, bookmarks: bool, initial: bool
) -> AsyncIterator[dict[str, Any]]:
    """Events after `version`; for "" and "0", or with `initial`, the present objects come first as ADDED."""
    loop = asyncio.get_running_loop()
    end = loop.time() + min(timeout_seconds or LONGEST_WATCH_SECONDS, LONGEST_WATCH_SECONDS)
    next_bookmark = loop.time() + BOOKMARK_SECONDS
    cursor = store.revision()
    if version in ("", "0") or initial:
        for item in store.items(scope.kind, scope.namespace):
            if scope.selector.matches(scope.kind, item):
                yield {"type": "ADDED", "object": item}
        if initial:
            yield _bookmark(scope.kind, cursor, {INITIAL_END: "true"})
    else:
        cursor = read_version(version)
        if cursor > store.revision():
            raise _too_new(cursor, store.revision())
    while True:
        if cursor < store.compacted():
            status = expired(cursor, store.compacted(), "too old resource version").status()
            yield {"type": "ERROR", "object": status}
            return
        newest = store.revision()
        for change in store.changes(cursor, scope.kind, scope.namespace):
            if event := _event(change, scope.selector):
                yield event
        cursor = newest
        now = loop.time()
        if bookmarks and now >= min(next_bookmark, end):
            next_bookmark = now + BOOKMARK_SECONDS
            yield _bookmark(scope.kind, cursor)
        if now >= end:
            return
        if store.revision() == cursor:
            await _wait(store, min(end, next_bookmark if bookmarks else end) - now)


def read_version(text: str) -> int:
    if not text.isdigit():
        raise bad_request(f'Invalid value: "{text}": resourceVersion must be a number')
    return int(text)


def expired(wanted: int, oldest: int, why: str) -> Refusal:
    return Refusal(410, f"{why}: {wanted} ({oldest})")


def _too_new(wanted: int, current: int) -> Refusal:
    message = f"Too large resource version: {wanted}, current: {current}"
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return Refusal(504, message, details={"causes": causes, "retryAfterSeconds": 1})


async def _wait(store: Store, seconds: float) -> None:
    try:
        await asyncio.wait_for(store.changed(), max(seconds, 0.001))
    except TimeoutError:
        return


def _event(change: Change, selector: Selector) -> dict[str, Any] | None:
    """The event of a change for a selector: an object can start or stop matching the selector."""
    before = change.previous is not None and selector.matches(change.kind, change.previous)
    after = change.body is not None and selector.matches(change.kind, change.body)
    if after:
        return {"type": "MODIFIED" if before else "ADDED", "object": change.body}
    if not before:
        return None
    assert change.previous is not None
    deleted = {**change.previous, "metadata": {**change.previous["metadata"], "resourceVersion": str(change.revision)}}
    return {"type": "DELETED", "object": deleted}


def _bookmark(kind: Kind, revision: int, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    metadata: Object = {"resourceVersion": str(revision), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    return {"type": "BOOKMARK", "object": {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata}}


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _write_token(revision: int, key: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps({"rv": revision, "start": key}).encode()).decode()


def _read_token(token: str) -> tuple[int, tuple[str, str]]:
    try:
        value = json.loads(base64.urlsafe_b64decode(token))
        return int(value["rv"]), (str(value["start"][0]), str(value["start"][1]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise bad_request(f"continue key is not valid: {error}") from error
