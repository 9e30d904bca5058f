"""A durable Google Cloud Workflows engine in a SQLite file; README.md shows how to embed it.

Each layer imports only the layers after it in this list: simulation · engine · store, lease · effects · interpreter ·
language · values · errors, limits, records, database, clock, billing · decisions.
"""

from .billing import billing_summary
from .clock import Clock, SystemClock, VirtualClock
from .database import Database, SqliteDatabase
from .effects.connectors import LoadDocument
from .effects.http import HttpRequest, HttpResponse, HttpTransport, check_status, parse_body
from .effects.keepalive import PooledTransport
from .effects.mocks import Mocks, ScriptedMocks
from .engine.engine import Engine
from .errors import (
    DeployError,
    EngineError,
    FailedPrecondition,
    InvalidArgument,
    LeaseLost,
    NotFound,
    Problem,
    ResourceExhausted,
    WorkflowError,
    system_error,
)
from .interpreter.answers import callback_value, error_value, timer_result
from .interpreter.history import Entry, read_entries, step_entry, timeline
from .interpreter.machine import Machine
from .interpreter.waits import Wait
from .language.compiler import compile_source
from .language.program import Program
from .limits import Limits
from .records import ExecutionRecord, Revision, WorkflowRecord
from .simulation import Simulation, drive, simulate
from .store import Store
from .values import NotJson, Value, decode_value, encode_value, from_json, to_json

__all__ = [
    "Clock",
    "Database",
    "DeployError",
    "Engine",
    "EngineError",
    "Entry",
    "ExecutionRecord",
    "FailedPrecondition",
    "HttpRequest",
    "HttpResponse",
    "HttpTransport",
    "InvalidArgument",
    "LeaseLost",
    "Limits",
    "LoadDocument",
    "Machine",
    "Mocks",
    "NotFound",
    "NotJson",
    "PooledTransport",
    "Problem",
    "Program",
    "ResourceExhausted",
    "Revision",
    "ScriptedMocks",
    "Simulation",
    "SqliteDatabase",
    "Store",
    "SystemClock",
    "Value",
    "VirtualClock",
    "Wait",
    "WorkflowError",
    "WorkflowRecord",
    "billing_summary",
    "callback_value",
    "check_status",
    "compile_source",
    "decode_value",
    "drive",
    "encode_value",
    "error_value",
    "from_json",
    "parse_body",
    "read_entries",
    "simulate",
    "step_entry",
    "system_error",
    "timeline",
    "timer_result",
    "to_json",
]
