"""Channel OTLP: the trace of a run, when the run ends and when its endpoint ends, to a receiver of OpenTelemetry.

The receiver is Google Cloud's Telemetry API, or a collector (https://opentelemetry.io/docs/specs/otlp/#otlphttp). Every
receiver of OTLP/HTTP takes protobuf; JSON is optional, and Google's page shows protobuf
(https://cloud.google.com/stackdriver/docs/reference/telemetry/overview). A span that is sent again has the same id.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from dropforge import __version__
from dropforge.base import names
from dropforge.base.errors import DropforgeError
from dropforge.base.settings import Settings
from dropforge.cloud.classify import client_errors
from dropforge.context import Context
from dropforge.run.record import Record
from dropforge.run.spans import Span, Value, read_steps, spans_of
from dropforge.spec import JobSpec

from .channel import Failure
from .facts import one_line
from .news import News
from .outgoing import post

NAME = "otlp"
TRACES = "/v1/traces"
SCOPE = "dropforge.run"
GIVE_UP_AFTER = timedelta(hours=1)
MAX_TEXT = 4000  # characters of a value; the Telemetry API allows 64 KiB (https://cloud.google.com/stackdriver/quotas)
_INTERNAL, _ERROR = 1, 2  # SpanKind and StatusCode
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """None: the receiver is the deployment's, and needs no secret."""
    return {}


def address_of(spec: JobSpec | None, settings: Settings) -> str | None:
    """The base URL of the deployment's receiver; None if it has none."""
    return settings.otlp_endpoint or None


def send(context: Context, address: str, news: News) -> Failure | None:
    """Send the spans that have ended; None on success, or if there is nothing to send. Never raises.

    The end of a run sends its trace. A notice after that end sends the spans that have ended since then, such as the
    endpoint. If the receiver is down, the run tries for GIVE_UP_AFTER and no longer: all runs of the deployment have
    this receiver, so all of them, and the sweep, would wait for it.
    """
    if not news.state.is_terminal:
        return None
    failures: tuple[type[Exception], ...] = (*client_errors(), DropforgeError)
    try:
        record = _record(context, news)
        if record.execution is None:  # no stage has begun: the spec was rejected, or its run was cancelled at once
            return None
        ended = ended_spans(record, read_spans(context, record), after_end=news.is_notice)
        url, headers = context.cloud.clients.telemetry(address.rstrip("/"))
    except failures as error:
        return Failure(f"the trace could not be made: {type(error).__name__}", may_pass=True)
    if not ended:
        return None
    body = protobuf_of(document_of(record.run, ended, context.settings))
    headers = {"Content-Type": "application/x-protobuf", **headers}
    failure = post(f"{url}{TRACES}", body, headers, "the OTLP receiver of the deployment", _own_address(url))
    since = max(span.ended for span in ended if span.ended)
    if failure and failure.may_pass and context.now() - since > GIVE_UP_AFTER:
        return Failure(f"{failure.problem}; the trace is given up after {GIVE_UP_AFTER}", may_pass=False)
    return failure


def _record(context: Context, news: News) -> Record:
    """The record of a run that has ended. The process that has ended the run remembers it."""
    known = None if news.is_notice else context.store.recall(news.event.run)
    return known if known is not None and known.state.is_terminal else context.store.record(news.event.run)


def read_spans(context: Context, record: Record) -> list[Span]:
    """Every span of a run so far, with the phases of its attempts. Raises the errors of Cloud Storage's client."""
    return spans_of(record, read_steps(context.store, record))


def ended_spans(record: Record, spans: Iterable[Span], *, after_end: bool) -> list[Span]:
    """The spans that have ended; `after_end`: those that have ended after their run."""
    end = record.history[-1].time
    return [span for span in spans if span.ended is not None and (span.ended > end or not after_end)]


def document_of(run: str, spans: Iterable[Span], settings: Settings) -> dict[str, Any]:
    """An ExportTraceServiceRequest in OTLP's JSON: ids in hex, times in nanoseconds as text.

    https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding. A span that has not ended has no end time.
    """
    resource = {
        "service.name": "dropforge",
        "service.namespace": settings.deployment,
        "service.version": __version__,
        "cloud.provider": "gcp",
        "cloud.account.id": settings.project,
        "cloud.region": settings.location,
        "gcp.project_id": settings.project,  # the Telemetry API stores the spans in this project
    }
    scope_spans = {"scope": {"name": SCOPE, "version": __version__}, "spans": [_span(run, span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope_spans]}]}


def protobuf_of(document: dict[str, Any]) -> bytes:
    """The same request in protobuf, whose JSON has ids in base64."""
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message: bytes = ParseDict(_with_base64(document), ExportTraceServiceRequest()).SerializeToString()
    return message


def _span(run: str, span: Span) -> dict[str, Any]:
    attributes = {**span.attributes, **({"error.type": span.error_type} if span.error_type else {})}
    ids = {"traceId": names.trace_id(run), "spanId": names.span_id(run, span.path)}
    return {
        **ids,
        **({"parentSpanId": names.span_id(run, span.parent)} if span.parent else {}),
        "name": span.name,
        "kind": _INTERNAL,
        "startTimeUnixNano": _nanoseconds(span.began),
        **({"endTimeUnixNano": _nanoseconds(span.ended)} if span.ended else {}),
        "attributes": _attributes(attributes),
        "status": {"code": _ERROR, "message": _text(span.problem)} if span.problem else {},
    }


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": _text(value)}


def _text(text: str) -> str:
    """A text of a spec, a container or the cloud, without credentials and control characters."""
    return one_line(text, MAX_TEXT)


def _nanoseconds(time: datetime) -> str:
    """Nanoseconds since 1970, exact: a float has too few digits."""
    since = time - _EPOCH
    return str((since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000)


def _with_base64(node: Any) -> Any:
    """A JSON document with every id of a trace or a span in base64."""
    if isinstance(node, list):
        return [_with_base64(item) for item in node]
    if not isinstance(node, dict):
        return node
    ids = ("traceId", "spanId", "parentSpanId")
    return {
        key: base64.b64encode(bytes.fromhex(value)).decode() if key in ids else _with_base64(value)
        for key, value in node.items()
    }


def _own_address(url: str) -> str:
    """host:port of the operator's receiver, which need not be on the internet; "" for a URL without a port."""
    try:
        parts = urlsplit(url)
        return f"{parts.hostname}:{parts.port}" if parts.port else ""
    except ValueError:  # `post` says what is wrong with the URL
        return ""
