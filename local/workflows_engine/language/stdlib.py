"""The standard library: the functions that depend only on their arguments, and the signatures of all functions.

`FUNCTIONS` has every function by its documented name. A blocking function is an effect of a call step; a contextual
function reads the running execution (time, environment, ids).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import re2

from ..clock import parse_timestamp
from ..errors import WorkflowError, limit_error, system_error
from ..values import INT_MAX, INT_MIN, Function, NotJson, Value, double_text, from_json, integer, kind, to_json
from .operators import text_of

REQUIRED: Final = object()
Style = Literal["pure", "contextual", "blocking"]


@dataclass(frozen=True)
class Signature:
    """A function's parameters with their defaults (or REQUIRED), and the Python function of a pure one."""

    name: str
    parameters: Mapping[str, Any]
    style: Style = "pure"
    run: Callable[..., Value] | None = None


def type_error(function: str, parameter: str, expected: str, value: Value) -> WorkflowError:
    return system_error("TypeError", f"{function}: argument '{parameter}' must be {expected}; got: {kind(value)}")


def value_error(function: str, message: str) -> WorkflowError:
    return system_error("ValueError", f"{function}: {message}")


T = TypeVar("T")


def _checker(type_: type[T], expected: str) -> Callable[[str, str, Value], T]:
    """A function (function, parameter, value) -> value that raises TypeError for values of other types."""

    def check(function: str, parameter: str, value: Value) -> T:
        if type(value) is not type_:
            raise type_error(function, parameter, expected, value)
        return value

    return check


_string = _checker(str, "a string")
_bytes = _checker(bytes, "bytes")
_boolean = _checker(bool, "a boolean")
_integer = _checker(int, "an integer")
_list = _checker(list, "a list")
_map = _checker(dict, "a map")


def _number(function: str, parameter: str, value: Value) -> int | float:
    if type(value) is not int and type(value) is not float:
        raise type_error(function, parameter, "a number", value)
    return value


# Expression helpers


def to_int(value: Value) -> Value:
    if type(value) is int:
        return value
    if type(value) is float:
        if not math.isfinite(value) or not INT_MIN <= value <= INT_MAX:
            raise value_error("int", f"{double_text(value)} does not fit a 64-bit integer")
        return int(value)
    if type(value) is str:
        digits = value[1:] if value[:1] in ("-", "+") else value
        if digits.isascii() and digits.isdigit() and len(digits) < 40:
            return integer(int(value))
        raise value_error("int", f"cannot convert {value[:40]!r} to an integer")
    raise type_error("int", "value", "a string or a number", value)


_DOUBLE: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\Z")


def to_double(value: Value) -> Value:
    if type(value) is int or type(value) is float:
        return float(value)
    if type(value) is str:
        if _DOUBLE.match(value):
            return float(value)
        raise value_error("double", f"cannot convert {value[:40]!r} to a double")
    raise type_error("double", "value", "a string or a number", value)


def to_string(value: Value) -> Value:
    text = text_of(value)
    if text is None:
        raise type_error("string", "value", "a string, number or boolean", value)
    return text


def keys(value: Value) -> Value:
    return list(_map("keys", "map", value))


def length(value: Value) -> Value:
    if type(value) is str or type(value) is list or type(value) is dict:
        return len(value)
    raise type_error("len", "value", "a list, map or string", value)


def default(value: Value, fallback: Value) -> Value:
    return fallback if value is None else value


def if_(condition: Value, then: Value, otherwise: Value) -> Value:
    if condition is None or condition is False:
        return otherwise
    if condition is True:
        return then
    raise type_error("if", "condition", "a boolean or null", condition)


# text


def _charset(function: str, charset: Value) -> str:
    name = _string(function, "charset", charset)
    if name.upper().replace("_", "-") not in ("UTF-8", "UTF8"):
        raise value_error(function, f"unsupported charset {name!r}; expected UTF-8")
    return "utf-8"


def text_decode(data: Value, charset: Value = "UTF-8") -> Value:
    encoding = _charset("text.decode", charset)
    try:
        return _bytes("text.decode", "data", data).decode(encoding)
    except UnicodeDecodeError as error:
        raise value_error("text.decode", "data is not valid UTF-8") from error


def text_encode(text: Value, charset: Value = "UTF-8") -> Value:
    return _string("text.encode", "text", text).encode(_charset("text.encode", charset), "replace")


def find_all(source: Value, substr: Value) -> Value:
    text, part = _string("text.find_all", "source", source), _string("text.find_all", "substr", substr)
    if not part:
        return list(range(len(text) + 1))
    positions, at = [], text.find(part)
    while at >= 0:
        positions.append(at)
        at = text.find(part, at + len(part))
    return positions


# The pages of text.find_all_regex and text.replace_all_regex say: the longest of the leftmost matches.
_quiet = re2.Options()
_quiet.log_errors = False
_quiet.longest_match = True


def _regex(function: str, pattern: Value) -> Any:
    text = _string(function, "regexp", pattern)
    try:
        return re2.compile(text, options=_quiet)
    except re2.error as error:
        raise value_error(function, f"invalid regular expression {text[:60]!r}") from error


def find_all_regex(source: Value, regexp: Value) -> Value:
    text, pattern = _string("text.find_all_regex", "source", source), _regex("text.find_all_regex", regexp)
    return [{"index": match.start(), "match": match.group()} for match in pattern.finditer(text)]


def match_regex(source: Value, regexp: Value) -> Value:
    text = _string("text.match_regex", "source", source)
    return _regex("text.match_regex", regexp).search(text) is not None


def replace_all(source: Value, substr: Value, repl: Value) -> Value:
    text, part = _string("text.replace_all", "source", source), _string("text.replace_all", "substr", substr)
    replacement = _string("text.replace_all", "repl", repl)
    _bounded(len(text) + text.count(part) * len(replacement))
    return text.replace(part, replacement)


def _bounded(size: int) -> None:
    """Refuse to build a string that no variable can hold."""
    if size > 16_000_000:
        raise limit_error(f"a string of {size} characters")


def replace_all_regex(source: Value, regexp: Value, repl: Value) -> Value:
    text, pattern = _string("text.replace_all_regex", "source", source), _regex("text.replace_all_regex", regexp)
    replacement = _string("text.replace_all_regex", "repl", repl)
    if (len(text) + 1) * len(replacement) > 16_000_000:
        _bounded(len(text) + sum(1 for _ in pattern.finditer(text)) * len(replacement))
    return pattern.sub(lambda _: replacement, text)


def split(source: Value, separator: Value) -> Value:
    text, part = _string("text.split", "source", source), _string("text.split", "separator", separator)
    return text.split(part) if part else list(text)


def substring(source: Value, start: Value, end: Value) -> Value:
    text = _string("text.substring", "source", source)
    first, last = _integer("text.substring", "start", start), _integer("text.substring", "end", end)
    if not 0 <= first <= last <= len(text):
        raise value_error("text.substring", f"range [{first}, {last}) is outside a string of length {len(text)}")
    return text[first:last]


def to_lower(source: Value) -> Value:
    return _string("text.to_lower", "source", source).lower()


def to_upper(source: Value) -> Value:
    return _string("text.to_upper", "source", source).upper()


def url_encode(source: Value) -> Value:
    return _percent_encoded(_string("text.url_encode", "source", source))


def url_encode_plus(source: Value) -> Value:
    return _percent_encoded(_string("text.url_encode_plus", "source", source)).replace("%20", "+")


def _percent_encoded(text: str) -> str:
    """The page says: only letters, digits and .-_ stay unencoded. Python's `quote` also leaves ~ unencoded."""
    return urllib.parse.quote(text, safe="", errors="replace").replace("~", "%7E")


def url_decode(source: Value) -> Value:
    text = _string("text.url_decode", "source", source)
    at = text.find("%")
    while at >= 0:
        if len(text) < at + 3 or not all(char in "0123456789abcdefABCDEF" for char in text[at + 1 : at + 3]):
            raise value_error("text.url_decode", f"invalid escape {text[at : at + 3]!r}")
        at = text.find("%", at + 1)
    try:
        return urllib.parse.unquote_plus(text, errors="strict")
    except UnicodeDecodeError as error:
        raise value_error("text.url_decode", "the decoded text is not valid UTF-8") from error


# json, base64, hash


def json_encode_to_string(data: Value, indent: Value = None) -> Value:
    return _json("json.encode_to_string", data, indent)


def json_encode(data: Value, indent: Value = None) -> Value:
    return _json("json.encode", data, indent).encode("utf-8", "replace")


def _json(function: str, data: Value, indent: Value) -> str:
    try:
        compact = to_json(data)
    except NotJson as error:
        raise value_error(function, str(error)) from error
    if indent is None or indent is False:
        return compact
    prefix, step = "", "    "
    if type(indent) is dict:
        prefix = _string(function, "indent.prefix", indent.get("prefix", ""))
        step = _string(function, "indent.indent", indent.get("indent", "    "))
    elif indent is not True:
        raise type_error(function, "indent", "a boolean or a map", indent)
    return json.dumps(data, indent=step, ensure_ascii=False).replace("\n", "\n" + prefix)


def json_decode(data: Value) -> Value:
    if type(data) is not bytes and type(data) is not str:
        raise type_error("json.decode", "data", "bytes or a string", data)
    try:
        return from_json(data.decode() if isinstance(data, bytes) else data)
    except ValueError as error:
        raise value_error("json.decode", f"invalid JSON: {error}") from error


def base64_encode(data: Value, padding: Value = True) -> Value:
    text = base64.b64encode(_bytes("base64.encode", "data", data)).decode()
    return text if _boolean("base64.encode", "padding", padding) else text.rstrip("=")


def base64_decode(data: Value, padding: Value = True) -> Value:
    text = _string("base64.decode", "data", data)
    text = text.replace("\r", "").replace("\n", "")  # the page says: line breaks are ignored
    if not _boolean("base64.decode", "padding", padding):
        text += "=" * (-len(text) % 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise value_error("base64.decode", "data is not valid base64") from error


_ALGORITHMS = ("MD5", "SHA1", "SHA224", "SHA256", "SHA384", "SHA512")


def _algorithm(function: str, algorithm: Value) -> str:
    name = _string(function, "algorithm", algorithm)
    if name not in _ALGORITHMS:
        raise value_error(function, f"unsupported algorithm {name!r}; expected one of {', '.join(_ALGORITHMS)}")
    return name.lower()


def compute_checksum(data: Value, algorithm: Value) -> Value:
    name = _algorithm("hash.compute_checksum", algorithm)
    return hashlib.new(name, _bytes("hash.compute_checksum", "data", data), usedforsecurity=False).digest()


def compute_hmac(key: Value, data: Value, algorithm: Value) -> Value:
    name = _algorithm("hash.compute_hmac", algorithm)
    return hmac.digest(_bytes("hash.compute_hmac", "key", key), _bytes("hash.compute_hmac", "data", data), name)


# list, map, math, time


def list_concat(objs: Value, val: Value) -> Value:
    return [*_list("list.concat", "objs", objs), val]


def list_prepend(objs: Value, val: Value) -> Value:
    return [val, *_list("list.prepend", "objs", objs)]


def map_get(map_: Value, keys_: Value) -> Value:
    """The page calls it a safe lookup: null if a value on the path is not a map or lacks the key."""
    path = keys_ if type(keys_) is list else [keys_]
    names = [_string("map.get", "keys", key) for key in path]
    value = map_
    for name in names:
        value = value.get(name) if type(value) is dict else None
    return value


def map_delete(map_: Value, key: Value) -> Value:
    name = _string("map.delete", "key", key)
    return {k: v for k, v in _map("map.delete", "map", map_).items() if k != name}


def map_merge(first: Value, second: Value) -> Value:
    return {**_map("map.merge", "first", first), **_map("map.merge", "second", second)}


def map_merge_nested(first: Value, second: Value) -> Value:
    merged = dict(_map("map.merge_nested", "first", first))
    for key, value in _map("map.merge_nested", "second", second).items():
        old = merged.get(key)
        merged[key] = map_merge_nested(old, value) if type(old) is dict and type(value) is dict else value
    return merged


def math_abs(x: Value) -> Value:
    number = abs(_number("math.abs", "x", x))
    return integer(number) if type(number) is int else number


def math_max(x: Value, y: Value) -> Value:
    return max(_number("math.max", "x", x), _number("math.max", "y", y))


def math_min(x: Value, y: Value) -> Value:
    return min(_number("math.min", "x", x), _number("math.min", "y", y))


def math_floor(x: Value) -> Value:
    number = _number("math.floor", "x", x)
    if not math.isfinite(number):
        raise value_error("math.floor", f"{double_text(float(number))} does not fit a 64-bit integer")
    return integer(math.floor(number))


def time_format(seconds: Value, timezone: Value = None) -> Value:
    number = _number("time.format", "seconds", seconds)
    zone: Any = UTC
    if timezone is not None:
        name = _string("time.format", "timezone", timezone)
        try:
            zone = UTC if name in ("UTC", "") else ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise value_error("time.format", f"unknown time zone {name!r}") from error
    try:
        moment = datetime.fromtimestamp(round(number * 1_000_000) // 1_000_000, zone)
        moment = moment.replace(microsecond=round(number * 1_000_000) % 1_000_000)
    except (OverflowError, ValueError, OSError) as error:
        raise value_error("time.format", f"{number} is out of range") from error
    text = moment.isoformat(timespec="microseconds")
    return text[:-6] + "Z" if text.endswith("+00:00") else text  # the page shows Z for "GMT", too


def time_parse(value: Value) -> Value:
    text = _string("time.parse", "value", value)
    try:
        return parse_timestamp(text)
    except ValueError as error:
        raise value_error("time.parse", f"{text[:60]!r} is not a timestamp such as 2024-07-12T14:50:33Z") from error


# retry and http policies


def _error_code(error: Value) -> Value:
    return error.get("code") if type(error) is dict else None


def _error_tags(error: Value) -> list[Value]:
    tags = error.get("tags") if type(error) is dict else None
    return tags if type(tags) is list else []


def default_retry_predicate(error: Value) -> Value:
    connection = {"ConnectionError", "ConnectionFailedError", "TimeoutError"}
    return _error_code(error) in (429, 502, 503, 504) or not connection.isdisjoint(map(str, _error_tags(error)))


def default_retry_predicate_non_idempotent(error: Value) -> Value:
    return _error_code(error) in (429, 503) or "ConnectionFailedError" in _error_tags(error)


def retry_always(_: Value) -> Value:
    return True


def retry_never(_: Value) -> Value:
    return False


DEFAULT_BACKOFF: Final = {"initial_delay": 1, "max_delay": 60, "multiplier": 1.25}
CONSTANTS: Final[dict[str, Value]] = {
    "retry.default_backoff": DEFAULT_BACKOFF,
    "http.default_retry": {
        "predicate": Function("http.default_retry_predicate"),
        "max_retries": 5,
        "backoff": DEFAULT_BACKOFF,
    },
    "http.default_retry_non_idempotent": {
        "predicate": Function("http.default_retry_predicate_non_idempotent"),
        "max_retries": 5,
        "backoff": DEFAULT_BACKOFF,
    },
}

_HTTP_ARGUMENTS = {
    "url": REQUIRED,
    "timeout": None,
    "body": None,
    "headers": None,
    "query": None,
    "auth": None,
    "private_service_name": None,
    "ca_certificate": None,
}


def _signature(name: str, style: Style, *required: str, **optional: Any) -> Signature:
    return Signature(name, {**dict.fromkeys(required, REQUIRED), **optional}, style)


def _pure(name: str, run: Callable[..., Value], *required: str, **optional: Any) -> Signature:
    return Signature(name, {**dict.fromkeys(required, REQUIRED), **optional}, "pure", run)


_WITHOUT_BODY: Final = {name: default for name, default in _HTTP_ARGUMENTS.items() if name != "body"}
_SIGNATURES: Final = (
    _pure("int", to_int, "value"),
    _pure("double", to_double, "value"),
    _pure("string", to_string, "value"),
    _pure("keys", keys, "map"),
    _pure("len", length, "value"),
    _pure("default", default, "value", "default"),
    _pure("if", if_, "condition", "true_value", "false_value"),
    _pure("get_type", kind, "value"),
    _pure("text.decode", text_decode, "data", charset="UTF-8"),
    _pure("text.encode", text_encode, "text", charset="UTF-8"),
    _pure("text.find_all", find_all, "source", "substr"),
    _pure("text.find_all_regex", find_all_regex, "source", "regexp"),
    _pure("text.match_regex", match_regex, "source", "regexp"),
    _pure("text.replace_all", replace_all, "source", "substr", "repl"),
    _pure("text.replace_all_regex", replace_all_regex, "source", "regexp", "repl"),
    _pure("text.split", split, "source", "separator"),
    _pure("text.substring", substring, "source", "start", "end"),
    _pure("text.to_lower", to_lower, "source"),
    _pure("text.to_upper", to_upper, "source"),
    _pure("text.url_decode", url_decode, "source"),
    _pure("text.url_encode", url_encode, "source"),
    _pure("text.url_encode_plus", url_encode_plus, "source"),
    _pure("json.decode", json_decode, "data"),
    _pure("json.encode", json_encode, "data", indent=None),
    _pure("json.encode_to_string", json_encode_to_string, "data", indent=None),
    _pure("base64.encode", base64_encode, "data", padding=True),
    _pure("base64.decode", base64_decode, "data", padding=True),
    _pure("hash.compute_checksum", compute_checksum, "data", "algorithm"),
    _pure("hash.compute_hmac", compute_hmac, "key", "data", "algorithm"),
    _pure("list.concat", list_concat, "objs", "val"),
    _pure("list.prepend", list_prepend, "objs", "val"),
    _pure("map.get", map_get, "map", "keys"),
    _pure("map.delete", map_delete, "map", "key"),
    _pure("map.merge", map_merge, "first", "second"),
    _pure("map.merge_nested", map_merge_nested, "first", "second"),
    _pure("math.abs", math_abs, "x"),
    _pure("math.max", math_max, "x", "y"),
    _pure("math.min", math_min, "x", "y"),
    _pure("math.floor", math_floor, "x"),
    _pure("time.format", time_format, "seconds", timezone=None),
    _pure("time.parse", time_parse, "value"),
    _pure("http.default_retry_predicate", default_retry_predicate, "exception"),
    _pure("http.default_retry_predicate_non_idempotent", default_retry_predicate_non_idempotent, "exception"),
    _pure("retry.always", retry_always, "exception"),
    _pure("retry.never", retry_never, "exception"),
    _signature("sys.now", "contextual"),
    _signature("sys.get_env", "contextual", "name", default=None),
    _signature("uuid.generate", "contextual"),
    _signature("events.create_callback_endpoint", "contextual", http_callback_method="POST"),
    _signature("sys.log", "blocking", data=None, severity="DEFAULT", text=None, json=None, timeout=None),
    _signature("sys.sleep", "blocking", "seconds"),
    _signature("sys.sleep_until", "blocking", "time"),
    _signature("events.await_callback", "blocking", "callback", timeout=43200.0),
    _signature("experimental.executions.run", "blocking", "workflow_id", argument=None, location=None, project_id=None),
    _signature("experimental.executions.map", "blocking", "workflow_id", "arguments", location=None, project_id=None),
    *(_signature(f"http.{verb}", "blocking", **_HTTP_ARGUMENTS) for verb in ("post", "put", "patch", "delete")),
    _signature("http.request", "blocking", "method", **_HTTP_ARGUMENTS),
    # The positional arguments on the page of http.get have no body, so it comes last.
    _signature("http.get", "blocking", **_WITHOUT_BODY, body=None),
)
FUNCTIONS: Final = {signature.name: signature for signature in _SIGNATURES}
MODULES: Final = frozenset(name.split(".")[0] for name in FUNCTIONS if "." in name) | {"googleapis"}
