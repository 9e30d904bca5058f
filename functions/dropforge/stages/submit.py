"""Stage `submit`: a spec event becomes one run and one execution, however often the event is delivered.

An invalid spec is a result, not an error: the record is REJECTED, and a message reports it. The same spec again joins
its run (run/intents.py). The stage raises only if a later delivery can succeed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from pydantic import JsonValue, ValidationError

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, InvalidSpec, Malformed, RetryLater, SpecProblem, first_problem
from dropforge.base.redact import cut, redact
from dropforge.base.settings import Settings
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.executions import find_execution, start_execution
from dropforge.cloud.objects import read_at_most
from dropforge.context import Context
from dropforge.money.limits import most_usd
from dropforge.run.events import Request
from dropforge.run.index import about
from dropforge.run.intents import Intent, claim, digest_of
from dropforge.run.record import Record, RunState, Source, Transition
from dropforge.spec import MAX_SPEC_BYTES, JobSpec, parse_spec
from dropforge.spec.policy import policy_of
from dropforge.tell import notices
from dropforge.tell.everybody import tell, tell_unstarted, warn
from dropforge.tell.run_events import answer_ignored, answer_joined

from . import admission
from .cancel import cancel
from .ceiling import with_defaults
from .rollout.requests import check_name

# The delivery that wrote the record starts the execution within this time; another delivery waits that long.
START_SECONDS = 5
# Bytes of JSON. A larger spec is an object of its own: each change writes the record again, and processes keep records.
MAX_SPEC_IN_RECORD = 16 * 1024
_COMMANDS = {"cancel", "spec_uri"}
_ENVELOPES = (
    "one of: a job spec itself, with api_version and nothing around it; "
    '{"spec_uri": "gs://BUCKET/OBJECT"} alone; {"cancel": "RUN"} alone; '
    "a change of a named endpoint (docs/endpoints.md#requests)"
)
_KINDS = {list: "list", str: "string", int: "number", float: "number", bool: "boolean"}
_URI = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]/[^\x00-\x1f\ud800-\udfff]{1,1024}")


def submit_object(
    context: Context, bucket: str, name: str, generation: str, size: int, again: str = "", md5: str = ""
) -> Record:
    """Submit a generation of an object in the specs bucket; the record of its run, or of the run that it joins.

    `again` is the object's metadata of this name. `md5` is the digest of its bytes, in base64, if the event has it.
    Raises RetryLater and client errors.
    """
    run = names.run_id_of_object(bucket, name, generation)
    source = source_of_object(context, bucket, name, generation)
    try:
        data = read_spec(context, bucket, name, generation, size, md5)
    except InvalidSpec as error:
        if context.store.has_cancel(run) and context.store.find(run) is None:
            return _cancel_unread(context, run, source)
        return _reject(context, run, source, error.problems, b"")
    return _submit(context, run, source, data, digest_of(f"gs://{bucket}/{name}", again, data))


def ignore_object(context: Context, bucket: str, name: str, generation: str) -> None:
    """Answer the upload of an object that is no spec, if it looks like one: a log line and a run event, no record.

    Other objects, such as rows of a data set, and folders get no answer. The answer is not an object, so it causes no
    further answer. Each process answers at most IGNORED_AN_HOUR times an hour: a program that fills the bucket cannot
    fill the log and the topic too.
    """
    kind = re.search(r"\.(json|ya?ml)\Z", name, re.IGNORECASE)
    if name.endswith("/") or not (kind or name.startswith(names.SPECS_PREFIX)):
        return
    if not context.ignored.take(context.now()):
        if context.ignored.is_just_used_up:
            message = f"more than {context.ignored.most} objects were ignored; the others of this hour get no answer"
            context.log(message, stage="submit", severity="NOTICE")
        return
    uri = cut(f"gs://{bucket}/{name}", 300)
    if name.startswith(names.SPECS_PREFIX):
        problem = f"its name ends in {kind[0]}" if kind else "its name does not end in .json"
        problem += "; a job spec is a JSON document"
    else:
        problem = f"it is not below {names.SPECS_PREFIX}"
    text = f"{uri} started nothing: {problem}; upload a job spec as gs://{bucket}/{names.SPECS_PREFIX}NAME.json"
    context.log("ignored an object", stage="submit", severity="NOTICE", object=uri, problem=text)
    answer_ignored(context, names.run_id_of_object(bucket, name, generation), uri, text)


def submit_message(context: Context, data: bytes, request: Request) -> Record:
    """Submit the spec in a request message. Raises RetryLater and client errors."""
    run = run_of_request(context.settings, request)
    if problem := _envelope_problem(data):
        return _reject(context, run, _source(request), [problem], data)
    return _submit(context, run, _source(request), data, _intent(request, data))


def submit_uri(context: Context, uri: str, request: Request) -> Record:
    """Submit the spec at a gs:// URI, as the run of the message that names the URI."""
    run = run_of_request(context.settings, request)
    try:
        data = _read_uri(context, uri)
    except InvalidSpec as error:
        return _reject(context, run, _source(request), error.problems, b"")
    return _submit(context, run, _source(request, uri), data, _intent(request, data, uri))


def _intent(request: Request, data: bytes, uri: str = "") -> str:
    """The digest of a message's request for a run; "" if its idempotency key says already which run it is."""
    return "" if request.has_key else digest_of(f"topic {request.topic} {uri}", request.again, data)


def run_of_request(settings: Settings, request: Request) -> str:
    """The run id of a request. The first requests topic has the ids that it had before there were other topics."""
    return names.run_id_of_message(request.key, "" if request.topic == settings.requests_topic else request.topic)


def _source(request: Request, uri: str = "") -> Source:
    """The origin of a request in a message. `uri` is that of its spec, if it is in an object."""
    return Source(text=f"topic {request.topic} message {request.key} {uri}".rstrip(), topic=request.topic)


def accept_again(context: Context, run: str) -> Record:
    """Recreate the record of a run after submit crashed between record and spec, which is an object of its own.

    Raises Malformed if the open mark does not say where the request came from.
    """
    store, mark = context.store, names.open_object(run)
    try:
        source = Source.model_validate_json(store.read(mark).data)
    except ValidationError as error:
        problem = f"the open mark {mark} does not say where the request came from: {first_problem(error)}"
        raise Malformed(problem) from None
    return _submit(context, run, source, store.read(names.spec_object(run)).data)


def resume(context: Context, record: Record) -> Record:
    """Continue a run that has a record: start its execution if the delivery that wrote the record crashed before that.

    Raises RetryLater while that delivery may still be at work.
    """
    if record.execution or record.state is not RunState.ACCEPTED:
        if record.state is RunState.REJECTED:
            tell(context, record)  # the first delivery may have crashed before this; the event id is the same
        tell_unstarted(context, record)
        return record
    if context.now() - record.created < timedelta(seconds=START_SECONDS):
        raise RetryLater(f"another delivery is submitting run {record.run}; this delivery is repeated later")
    execution = find_execution(context.cloud, record.run, record.created)
    return _begin(context, record, context.store.spec(record.run), execution)


def note_execution(context: Context, record: Record, execution: str) -> Record:
    """Note the execution in the record. The first noted execution owns the run; `provision` ends any other."""
    return context.store.update(record.run, lambda latest: latest.claimed(execution))


def read_spec(context: Context, bucket: str, name: str, generation: str | None, size: int, md5: str = "") -> bytes:
    """The bytes of a spec object. Raises InvalidSpec if the object is too large, or exists no longer.

    `md5`: the digest of the bytes, in base64. If a repeated upload has replaced the generation, the present generation
    has the same bytes.
    """
    if size > MAX_SPEC_BYTES:
        raise InvalidSpec(
            [SpecProblem("", "the spec is too large", f"{size} bytes", f"at most {MAX_SPEC_BYTES} bytes")]
        )
    client = context.cloud.clients.storage()
    blob = client.bucket(bucket).blob(name, generation=int(generation) if generation else None)
    data = read_at_most(blob, MAX_SPEC_BYTES + 1)
    if data is None and md5:
        present = client.bucket(bucket).get_blob(name, timeout=TIMEOUT_SECONDS)
        data = read_at_most(present, MAX_SPEC_BYTES + 1) if present is not None and present.md5_hash == md5 else None
    if data is None:
        message = "the spec was deleted or overwritten before it was read"
        expected = "an object that stays until its run is accepted"
        raise InvalidSpec([SpecProblem("", message, f"gs://{bucket}/{name}", expected)])
    return _plain(data)


def _plain(data: bytes) -> bytes:
    """The text of an object that was uploaded with `Content-Encoding: gzip`, cut a byte after the size of a spec."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(data, MAX_SPEC_BYTES + 1)
    except zlib.error:
        return data


def _read_uri(context: Context, uri: str) -> bytes:
    from google.api_core.exceptions import BadRequest, Forbidden

    if not _URI.fullmatch(uri):
        raise InvalidSpec([SpecProblem("/spec_uri", "not a gs:// URI", cut(repr(uri), 120), "gs://bucket/path")])
    bucket, name = names.parse_gs_uri(uri)
    if not _may_hold_specs(bucket, context.settings):
        allowed = ", ".join([context.settings.specs_bucket, *_data_buckets(context.settings)])
        problem = SpecProblem("/spec_uri", "specs are not read from this bucket", f"gs://{bucket}", f"one of {allowed}")
        raise InvalidSpec([problem])
    try:
        blob = context.cloud.clients.storage().bucket(bucket).get_blob(name, timeout=TIMEOUT_SECONDS)
    except (BadRequest, Forbidden) as error:  # permanent: a raised error would repeat the message for a day
        problem = SpecProblem("/spec_uri", "the object may not be read", uri, cut(error.message, 300))
        raise InvalidSpec([problem]) from None
    if blob is None:
        raise InvalidSpec([SpecProblem("/spec_uri", "the object does not exist", uri, "a job spec")])
    data = read_spec(context, bucket, name, str(blob.generation), int(blob.size or 0))
    if not _is_spec(data):  # the publisher may not be allowed to read the object: nothing of its text is repeated
        expected = "a JSON object with api_version, as every job spec has"
        raise InvalidSpec([SpecProblem("/spec_uri", "the object is not a job spec", uri, expected)])
    return data


def _may_hold_specs(bucket: str, settings: Settings) -> bool:
    """Whether a request may name a spec in this bucket. The runs bucket has other users' specs and records."""
    allowed = {settings.specs_bucket, *_data_buckets(settings)}
    return bucket != settings.runs_bucket and (bucket in allowed or "*" in allowed)


def _data_buckets(settings: Settings) -> list[str]:
    return [bucket for bucket in settings.data_buckets.split(",") if bucket]


def _is_spec(data: bytes) -> bool:
    """Whether an object was meant as a job spec, even if it has mistakes."""
    content = json_of(data)
    return isinstance(content, dict) and "api_version" in content


def json_of(data: bytes) -> Any:
    """The content of a small JSON document; None for other data, whose problem `parse_spec` reports."""
    if len(data) > MAX_SPEC_BYTES:  # before it is parsed: parsed JSON takes up to sixty times the memory of its text
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_text(texts: Iterable[str]) -> bool:
    """Whether the texts have no half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _envelope_problem(data: bytes) -> SpecProblem | None:
    """What is wrong with a message that was not written as a job spec; None for a spec, with whatever mistakes."""
    content = json_of(data)
    if content is None or (isinstance(content, dict) and not _is_text(content)):
        return None
    if not isinstance(content, dict):
        return SpecProblem("", "the message is not a request", f"a JSON {_KINDS[type(content)]}", _ENVELOPES)
    if "api_version" in content or (content.keys() & JobSpec.model_fields.keys() and not content.keys() & _COMMANDS):
        return None
    found = ", ".join(cut(repr(field), 60) for field in list(content)[:10]) or "an empty object"
    return SpecProblem("", "the message is not a request", found, _ENVELOPES)


def _submit(context: Context, run: str, source: Source, data: bytes, intent: str = "") -> Record:
    """Accept or reject a spec as `run`, or let it join the run of the same request; without `intent`, it joins none."""
    try:
        spec = with_defaults(parse_spec(data), policy_of(context.settings.policy))
        admission.check(context.cloud, spec)
        check_name(context, spec, source.topic)
    except InvalidSpec as error:
        return _reject(context, run, source, error.problems, data)
    mine = Intent(run=run, source=source)
    held = claim(context.store, intent, mine, context.now()) if intent else mine
    if held.run == run:
        return _accept(context, mine, spec)
    known = context.store.find(held.run)
    record = resume(context, known) if known else _accept(context, held, spec)
    _join(context, record, mine)
    return record


def _join(context: Context, record: Record, mine: Intent) -> None:
    """Answer a request that joined a run, and tell people once. A cancel of the request ends a run that still works."""
    source = mine.source.text
    notice = notices.joined(source, record.run)
    context.log("joined", stage="submit", run=record.run, severity="NOTICE", source=source)
    if not record.state.is_terminal and context.store.has_cancel(mine.run, record.topic):
        cancel(context, record.run, cause=context.store.early_cause(mine.run, record.topic))
    if problem := answer_joined(context, record, notice, mine.run, source):
        raise CloudError(ErrorClass.TRANSIENT, problem)
    if record.state is not RunState.REJECTED:  # by another delivery, just now
        warn(context, record, context.store.spec(record.run), notice)


def _accept(context: Context, intent: Intent, spec: JobSpec) -> Record:
    """The record of a run, which is made now, or was made by another delivery; its execution is started."""
    store, run, source = context.store, intent.run, intent.source
    text = spec.model_dump_json(by_alias=True)
    is_inside = len(text.encode()) <= MAX_SPEC_IN_RECORD
    if not is_inside and not store.put_new(names.spec_object(run), text.encode()):
        if existing := store.find(run):
            return resume(context, existing)
        spec = store.spec_beside(run)  # from another delivery, perhaps with another spec: the first counts
    now = context.now()
    record = Record(
        run=run,
        name=spec.name,
        source=source.text,
        topic=source.topic,
        state=RunState.ACCEPTED,
        created=now,
        submitter=source.submitter,
        history=[Transition(state=RunState.ACCEPTED, time=now)],
        resources=[],
        about=about(spec, most_usd(spec)),
        spec=json.loads(text) if is_inside else None,
    )
    if not store.create(record):
        return resume(context, store.record(run))
    context.log("accepted", stage="submit", run=run, source=source.text)
    return _begin(context, record, spec, None)


def source_of_object(context: Context, bucket: str, name: str, generation: str) -> Source:
    """The origin of a request in the specs bucket: the object, and the person who dropped it in the console."""
    text = f"gs://{bucket}/{name}#{generation}"
    return Source(text=text, submitter=_submitter(context, bucket, name, generation))


def _submitter(context: Context, specs_bucket: str, name: str, generation: str) -> str:
    """Who dropped the spec in the console; "" for a spec from elsewhere.

    The metadata of an object is what its writer wrote. It counts only where nobody but the console's account may write.
    """
    if not (context.settings.console_topic and name.startswith(names.CONSOLE_SPECS_PREFIX)):
        return ""
    bucket = context.cloud.clients.storage().bucket(specs_bucket)
    blob = bucket.get_blob(name, generation=int(generation), timeout=TIMEOUT_SECONDS)
    named = str((blob.metadata or {}).get(names.SUBMITTER, "")) if blob else ""
    return named if names.is_email(named) else ""


def _begin(context: Context, record: Record, spec: JobSpec, execution: str | None) -> Record:
    """Announce that a run is accepted, then start its execution, or note the execution that it has.

    The order matters: after the execution has begun, no function announces the acceptance. After a crash here, the next
    delivery or the sweep continues.
    """
    if context.store.has_cancel(record.run, record.topic):
        cancel(context, record.run, cause=context.store.early_cause(record.run, record.topic))
        return context.store.record(record.run)
    if execution:  # it was started after everybody was told
        return note_execution(context, record, execution)
    tell(context, record, spec)
    # The first call of the execution claims the run in the bucket. Here, only the answer names the execution.
    return record.claimed(start_execution(context.cloud, record.run))


def _cancel_unread(context: Context, run: str, source: Source) -> Record:
    """The record of a run whose spec was deleted, or cancelled, before it was read: the run has ended."""
    now, cause = context.now(), context.store.early_cause(run, "")
    history = [Transition(state=RunState.CANCELLED, time=now)]
    record = Record(
        run=run,
        name="",
        source=source.text,
        topic=source.topic,
        state=RunState.CANCELLED,
        created=now,
        submitter=source.submitter,
        history=history,
        cancel_requested=now,
        cancelled_by=cause.person,
        cancel_cause=cause.text,
    )
    if not context.store.create(record):
        return resume(context, context.store.record(run))
    context.log("cancelled before it was read", stage="submit", run=run, source=source.text)
    tell_unstarted(context, record)
    return record


def _reject(context: Context, run: str, source: Source, problems: list[SpecProblem], data: bytes) -> Record:
    store = context.store
    if existing := store.find(run):  # another delivery has accepted a spec that this delivery could not read
        record = resume(context, existing)
        if record.run != run:
            _join(context, record, Intent(run=run, source=source))
        return record
    now = context.now()
    listed: list[dict[str, JsonValue]] = [
        {field: text and redact(text) for field, text in problem._asdict().items()} for problem in problems
    ]
    record = Record(
        run=run,
        name=_name(data),
        source=source.text,
        topic=source.topic,
        state=RunState.REJECTED,
        created=now,
        submitter=source.submitter,
        history=[Transition(state=RunState.REJECTED, time=now)],
        problems=listed,
    )
    errors = {"run": run, "source": source.text, "errors": listed}
    store.put_new(names.errors_object(run), json.dumps(errors, indent=2, ensure_ascii=False).encode())
    if not store.create(record):
        return resume(context, store.record(run))
    texts = [str(problem) for problem in problems]
    context.log("rejected", stage="submit", run=run, source=source.text, severity="WARNING", problems=texts)
    tell(context, record)
    return record


def _name(data: bytes) -> str:
    """The `name` in a rejected spec; "" if it cannot be read."""
    try:
        name: Any = json_of(data)["name"]
        name.encode()
        return cut(name, 63)
    except (ValueError, KeyError, TypeError, AttributeError):  # half of a surrogate pair is no text
        return ""
