"""Google Cloud's Telemetry API: takes traces over OTLP/HTTP, checks them, and lists what it took.

Only protobuf is taken: it is what Google's page shows. Metrics and logs answer UNIMPLEMENTED.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.access import guarded
from ..kit.emulator import PassiveEmulator
from ..kit.faults import failures
from ..kit.routing import Call, Route, mount
from ..kit.times import rfc3339
from . import rules
from .permissions import NEEDS

Json = dict[str, Any]
SCHEMA = """
CREATE TABLE IF NOT EXISTS telemetry_spans (
    id INTEGER PRIMARY KEY AUTOINCREMENT, trace TEXT NOT NULL, span TEXT NOT NULL, received REAL NOT NULL,
    content TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS telemetry_spans_by_trace ON telemetry_spans (trace);
"""


class TelemetryEmulator(PassiveEmulator):
    """POST /v1/traces. The stack's own: GET /telemetry/traces/TRACE; POST /telemetry/_fail."""

    def __init__(self, db: Database, clock: Clock, project: str) -> None:
        self.db = db
        self.clock = clock
        self.project = project
        self._failures: list[int] = []
        db.connection.executescript(SCHEMA)

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount(
            [
                Route("POST", "/v1/traces", guarded(self._export, NEEDS["export_traces"])),
                Route("POST", "/v1/metrics", _unimplemented),
                Route("POST", "/v1/logs", _unimplemented),
                Route("GET", "/telemetry/traces/{trace}", lambda call: {"spans": self.spans(call.names["trace"])}),
                Route("POST", "/telemetry/_fail", self._fail),
            ]
        )

    def spans(self, trace: str) -> list[Json]:
        """Every span of a trace in the order of its arrival, one entry for each time that it was sent."""
        rows = self.db.rows("SELECT * FROM telemetry_spans WHERE trace = ? ORDER BY id", (trace,))
        return [
            {"spanId": row["span"], "received": rfc3339(row["received"]), **json.loads(row["content"])} for row in rows
        ]

    def _export(self, call: Call) -> web.Response:
        if self._failures:
            return web.Response(status=self._failures.pop(0))
        request = rules.read(call.headers, call.body, self.project)
        for trace, span, content in _contents(request):
            self.db.write(
                "INSERT INTO telemetry_spans (trace, span, received, content) VALUES (?, ?, ?, ?)",
                (trace, span, self.clock.now(), json.dumps(content)),
            )
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type=rules.PROTOBUF)

    def _fail(self, call: Call) -> Json:
        """Answer the next `count` requests with `status`."""
        self._failures = failures(call)
        return {}


def _contents(request: Any) -> Iterator[tuple[str, str, Json]]:
    """The ids of each span in hex, and the span as JSON with its resource's attributes by key."""
    for resource_spans in request.resource_spans:
        resource = _by_key(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                content = {
                    "parentSpanId": span.parent_span_id.hex(),
                    "name": span.name,
                    "start": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano,
                    "attributes": _by_key(span.attributes),
                    "status": MessageToDict(span.status),
                    "resource": resource,
                }
                yield span.trace_id.hex(), span.span_id.hex(), content


def _by_key(attributes: Any) -> Json:
    return {attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in attributes}


def _unimplemented(call: Call) -> Any:
    raise ApiError("UNIMPLEMENTED", f"{call.path} is not emulated: dropforge sends traces only")
