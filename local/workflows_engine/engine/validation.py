"""Checks of the arguments that callers give to the engine. Every check raises InvalidArgument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ..errors import InvalidArgument
from ..limits import Limits
from ..values import from_json, utf8

WORKFLOW_NAME: Final = re.compile(r"projects/([^/]+)/locations/([^/]+)/workflows/([A-Za-z][A-Za-z0-9_-]{0,63})\Z")
CALL_LOG_LEVELS: Final = ("", "CALL_LOG_LEVEL_UNSPECIFIED", "LOG_ALL_CALLS", "LOG_ERRORS_ONLY", "LOG_NONE")
HISTORY_LEVELS: Final = (
    "",
    "EXECUTION_HISTORY_LEVEL_UNSPECIFIED",
    "EXECUTION_HISTORY_BASIC",
    "EXECUTION_HISTORY_DETAILED",
)


def check_name(name: str) -> None:
    if not WORKFLOW_NAME.match(name):
        raise InvalidArgument(f"{name!r} is not of the form projects/P/locations/L/workflows/W")


def check_argument(argument: str, limits: Limits) -> None:
    try:
        size = len(utf8(argument))
    except UnicodeError as error:
        raise InvalidArgument(f"argument: {error}") from error
    if size > limits.argument_bytes:
        raise InvalidArgument(f"argument is {size} bytes; the limit is {limits.argument_bytes}")
    try:
        from_json(argument)
    except ValueError as error:
        raise InvalidArgument(f"argument is not JSON: {error}") from error


def check_levels(call_log_level: str, history_level: str) -> None:
    if call_log_level not in CALL_LOG_LEVELS:
        raise InvalidArgument(f"call log level {call_log_level!r} is none of {', '.join(CALL_LOG_LEVELS[1:])}")
    if history_level not in HISTORY_LEVELS:
        raise InvalidArgument(f"history level {history_level!r} is none of {', '.join(HISTORY_LEVELS[1:])}")


def check_labels(labels: Mapping[str, str], limits: Limits) -> None:
    if len(labels) > limits.labels:
        raise InvalidArgument(f"{len(labels)} labels; the limit is {limits.labels}")
    for key, value in labels.items():
        if not re.fullmatch(r"[^\W\dA-Z_][\w-]{0,62}", key) or key != key.lower():
            raise InvalidArgument(
                f"label key {key!r} must be a lowercase letter and then letters, digits, _ or -, 63 in all"
            )
        if not isinstance(value, str) or not re.fullmatch(r"[\w-]{0,63}", value) or value != value.lower():
            raise InvalidArgument(
                f"label {key!r} has value {value!r}; expected lowercase letters, digits, _ and -, 63 at most"
            )


def check_environment(environment: Mapping[str, str], limits: Limits) -> None:
    if len(environment) > limits.environment_variables:
        raise InvalidArgument(f"{len(environment)} environment variables; the limit is {limits.environment_variables}")
    for key, value in environment.items():
        if not key or key.startswith(("GOOGLE", "WORKFLOWS")):
            raise InvalidArgument(f"environment variable {key!r} may not be empty or start with GOOGLE or WORKFLOWS")
        if len(value.encode()) > limits.environment_variable_bytes:
            raise InvalidArgument(f"environment variable {key!r} is over {limits.environment_variable_bytes} bytes")
