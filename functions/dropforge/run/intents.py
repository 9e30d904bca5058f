"""Requests that are repeated: a spec is known by what it asks for, not by the object or the message that carried it.

A client repeats an upload, or a message, whose answer was lost: google-cloud-storage since version 3.0
(https://github.com/googleapis/python-storage/pull/1400), and Pub/Sub's publisher. Each repetition is another
generation, or another message. Here it joins the run that the first one became.

An object of the runs bucket says which run a request has. Its name is the digest of the request, and it is written
with a precondition: of many deliveries at once, one decides. Every delivery then does the same work for that run, so
nobody waits for a delivery that has crashed.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timedelta

from pydantic import ValidationError

from dropforge.base import names
from dropforge.base.errors import Conflict, Malformed, NotFound

from .record import Record, RunState, Source, Stored
from .store import UPDATE_TRIES, RunStore

# A request joins a run until this long after its end. Pub/Sub's publisher repeats a message for ten minutes
# (https://cloud.google.com/pubsub/docs/publish-best-practices), Cloud Storage's clients repeat an upload for two.
JOIN_FOR = timedelta(minutes=10)


class Intent(Stored):
    """The run of a request, and where the request came from."""

    run: str
    source: Source


def digest_of(place: str, again: str, data: bytes) -> str:
    """The digest of a request for a run.

    `place`: the object without its generation, or the topic. `again`: what the submitter wrote to get another run.
    """
    parts = [place, again, hashlib.sha256(data).hexdigest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def claim(store: RunStore, digest: str, mine: Intent, now: datetime) -> Intent:
    """The run that a request has: `mine`, or the run that it joins. A repeated call gives the same answer.

    Raises Malformed, and Conflict after many lost races.
    """
    name, text = names.intent_object(digest), mine.model_dump_json().encode()
    for _ in range(UPDATE_TRIES):
        if store.put_new(name, text):
            return mine
        held, generation = _read(store, name)
        if held.run == mine.run or store.exists(mine.run):
            return mine
        joined = names.joined_object(mine.run)
        try:
            return _read(store, joined)[0]
        except NotFound:
            pass  # this request has joined no run yet
        if _is_joined(store.find(held.run), now):
            store.put_new(joined, held.model_dump_json().encode())
            return held
        if store.write(name, text, generation):
            return mine
    raise Conflict(f"gs://{store.bucket.name}/{name} kept changing through {UPDATE_TRIES} tries")


def _is_joined(record: Record | None, now: datetime) -> bool:
    """Whether a request joins the run that the same request became before; None: that run gets its record just now.

    Whoever has cancelled a run and asks again wants another run, and a rejected run cost nothing.
    """
    if record is None:
        return True
    if record.cancel_requested or record.state in (RunState.CANCELLED, RunState.REJECTED):
        return False
    return not record.state.is_terminal or now - record.history[-1].time < JOIN_FOR


def _read(store: RunStore, name: str) -> tuple[Intent, int]:
    """An intent, and the generation of its object. Raises NotFound and Malformed."""
    data, generation = store.read(name)
    try:
        return Intent.model_validate_json(data), generation
    except ValidationError:
        raise Malformed(f"gs://{store.bucket.name}/{name} does not say which run a request has") from None
