"""Every function of the standard library: results, and the tags and messages of its errors."""

from __future__ import annotations

import base64
import hmac
import json
import re
from pathlib import Path
from typing import Any

import pytest

from workflows_engine import VirtualClock, simulate
from workflows_engine.language.stdlib import FUNCTIONS

CASES: list[tuple[str, Any]] = [
    ('text.decode(text.encode("hé"))', "hé"),
    ('text.decode(text.encode("x", "UTF-8"), "UTF-8")', "x"),
    ('text.find_all("banana", "an")', [1, 3]),
    ('text.find_all("aaa", "aa")', [0]),
    ('text.find_all_regex("a1éb22", "[a-z][0-9]+")', [{"index": 0, "match": "a1"}, {"index": 3, "match": "b22"}]),
    ('text.match_regex("hello", "l+")', True),
    ('text.match_regex("hello", "^l")', False),
    ('text.replace_all("a.b.c", ".", "-")', "a-b-c"),
    ('text.replace_all_regex("a1b22", "[0-9]+", "#")', "a#b#"),
    ('text.replace_all_regex("ab", "(a)", "\\\\1$1")', "\\1$1b"),
    ('text.split("a,b,,c", ",")', ["a", "b", "", "c"]),
    ('text.split("abc", "")', ["a", "b", "c"]),
    ('text.substring("hello", 1, 3)', "el"),
    ('text.substring("hello", 0, 5)', "hello"),
    ('text.substring("hello", 2, 2)', ""),
    ('text.to_lower("ÄB")', "äb"),
    ('text.to_upper("äb")', "ÄB"),
    ('text.url_encode("a b/ü&")', "a%20b%2F%C3%BC%26"),
    ('text.url_encode_plus("a b&")', "a+b%26"),
    ('text.url_decode("a%20b+c%C3%BC")', "a b cü"),
    ('json.decode("[1, 2.0, null, {}]")', [1, 2.0, None, {}]),
    ('json.decode(text.encode("5"))', 5),
    ('json.decode("18446744073709551616")', 1.8446744073709552e19),
    ('json.encode_to_string(["ü", 1, 1.5, true, null])', '["ü",1,1.5,true,null]'),
    ("text.decode(json.encode([1]))", "[1]"),
    ("json.encode_to_string([1, 2], true)", "[\n    1,\n    2\n]"),
    ('base64.encode(text.encode("hi?>"))', "aGk/Pg=="),
    ('base64.encode(text.encode("hi?>"), false)', "aGk/Pg"),
    ('text.decode(base64.decode("aGk="))', "hi"),
    ('text.decode(base64.decode("aGk", false))', "hi"),
    ('base64.encode(hash.compute_checksum(text.encode("a"), "MD5"))', "DMF1ucDxtqgxw5niaXcmYQ=="),
    ('len(base64.encode(hash.compute_checksum(text.encode("a"), "SHA512")))', 88),
    (
        'base64.encode(hash.compute_hmac(text.encode("k"), text.encode("d"), "SHA1"))',
        base64.b64encode(hmac.digest(b"k", b"d", "sha1")).decode(),
    ),
    ("list.concat([1], 2)", [1, 2]),
    ("list.concat([1], [2])", [1, [2]]),
    ("list.prepend([1], 2)", [2, 1]),
    ('map.get(m, "a")', 1),
    ('map.get(m, "zz")', None),
    ('map.get(m, ["in", "x"])', 2),
    ('map.get(m, ["in", "no", "x"])', None),
    ('map.get(m, ["a", "x"])', None),
    ('map.delete(m, "in")', {"a": 1}),
    ('map.delete(m, "zz")', {"a": 1, "in": {"x": 2}}),
    ("map.merge(m, n)", {"a": 9, "in": {"y": 3}}),
    ("map.merge_nested(m, n)", {"a": 9, "in": {"x": 2, "y": 3}}),
    ("math.abs(-3)", 3),
    ("math.abs(-3.5)", 3.5),
    ("math.max(1, 2.5)", 2.5),
    ("math.min(1, 2.5)", 1),
    ("math.floor(-1.5)", -2),
    ("time.format(1720795833)", "2024-07-12T14:50:33.000000Z"),
    ('time.format(1720795833.5, "Europe/Berlin")', "2024-07-12T16:50:33.500000+02:00"),
    ('time.parse("2024-07-12T14:50:33Z")', 1720795833.0),
    ('time.parse("2024-07-12T16:50:33.5+02:00")', 1720795833.5),
    ('time.parse("2024-07-12t14:50:33z")', 1720795833.0),
    ('time.parse("2024-07-12T09:20:33.123456789-05:30")', 1720795833.123456),
    ('time.parse("2016-12-31T23:59:60Z")', 1483228800.0),
    ('time.parse("1990-12-31T15:59:60.5-08:00")', 662688000.5),
    ('time.parse("1969-12-31T23:59:59.25Z")', -0.75),
    ('time.parse("2024-02-29T00:00:00-00:00")', 1709164800.0),
    ("sys.now()", 1_750_000_000.25),
    ('sys.get_env("GOOGLE_CLOUD_PROJECT_ID")', "test-project"),
    ('sys.get_env("TEAM")', "search"),
    ('sys.get_env("NOTHING")', None),
    ('sys.get_env("NOTHING", "fallback")', "fallback"),
    ("len(uuid.generate())", 36),
    ("retry.always(null)", True),
    ("retry.never(null)", False),
    ("retry.default_backoff", {"initial_delay": 1, "max_delay": 60, "multiplier": 1.25}),
    ("http.default_retry.max_retries", 5),
]


NOT_TIMESTAMPS = (
    "tomorrow",
    "2024-07-12",
    "2024-07-12T14Z",
    "2024-07-12T14:50Z",
    "20240712T145033Z",
    "2024-W28-5T14:50:33Z",
    "2024-07-12T14:50:33",
    "2024-07-12T14:50:33,5Z",
    "2024-07-12T14:50:33.Z",
    "2024-07-12T14:50:33+02",
    "2024-07-12T14:50:33+0200",
    "2024-07-12T14:50:33+24:00",
    "2024-07-12T14:50:33+02:00:00",
    "2024-07-12 14:50:33Z",
    " 2024-07-12T14:50:33Z",
    "2024-07-12T24:00:00Z",
    "2024-07-12T14:60:33Z",
    "2024-07-12T14:50:61Z",
    "2023-02-29T14:50:33Z",
    "2024-13-12T14:50:33Z",
    "0001-01-01T00:00:00+01:00",
    "٢٠٢٤-07-12T14:50:33Z",
)


@pytest.mark.parametrize(("expression", "expected"), CASES)
def test_result(lab: Any, expression: str, expected: Any) -> None:
    value = lab.value(expression, m={"a": 1, "in": {"x": 2}}, n={"a": 9, "in": {"y": 3}})
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("expression", "tag", "message"),
    [
        ("text.decode(1)", "TypeError", "'data' must be bytes; got: integer"),
        ('text.decode(base64.decode("/w=="))', "ValueError", "not valid UTF-8"),
        ("text.encode(null)", "TypeError", "'text' must be a string; got: null"),
        ('text.encode("x", "EBCDIC")', "ValueError", "unsupported charset"),
        ('text.find_all(1, "x")', "TypeError", "'source'"),
        ('text.find_all_regex("x", "(")', "ValueError", "invalid regular expression"),
        ('text.match_regex("x", "(?=x)")', "ValueError", "invalid regular expression"),
        ('text.match_regex("xx", "(x)\\\\1")', "ValueError", "invalid regular expression"),
        ('text.replace_all("x", "x", 1)', "TypeError", "'repl'"),
        ('text.split(null, ",")', "TypeError", "'source' must be a string"),
        ('text.substring("abc", 2, 1)', "ValueError", "outside a string of length 3"),
        ('text.substring("abc", 0, 4)', "ValueError", "outside"),
        ('text.substring("abc", 0.0, 1)', "TypeError", "'start' must be an integer"),
        ("text.to_lower(1)", "TypeError", "'source'"),
        ('text.url_decode("%zz")', "ValueError", "invalid escape"),
        ('json.decode("{")', "ValueError", "invalid JSON"),
        ('json.decode("NaN")', "ValueError", "invalid JSON"),
        ("json.decode(1)", "TypeError", "bytes or a string"),
        ('json.encode(text.encode("x"))', "ValueError", "bytes is not JSON-encodable"),
        ('base64.encode("x")', "TypeError", "must be bytes; got: string"),
        ('base64.decode("*")', "ValueError", "not valid base64"),
        ('hash.compute_checksum("x", "MD5")', "TypeError", "must be bytes"),
        ('hash.compute_checksum(text.encode("x"), "CRC")', "ValueError", "unsupported algorithm 'CRC'"),
        ('hash.compute_hmac(text.encode("x"), "y", "MD5")', "TypeError", "'data' must be bytes"),
        ("list.concat(1, 2)", "TypeError", "'objs' must be a list; got: integer"),
        ("list.prepend(null, 2)", "TypeError", "'objs'"),
        ("map.get(null, 1)", "TypeError", "'keys' must be a string; got: integer"),
        ('map.get(null, ["a", null])', "TypeError", "'keys' must be a string; got: null"),
        ("map.merge([], [])", "TypeError", "'first' must be a map"),
        ('math.abs("x")', "TypeError", "'x' must be a number"),
        ("math.max(1, null)", "TypeError", "'y' must be a number"),
        ("math.abs(-9223372036854775808)", "ValueError", "integer overflow"),
        ('time.format("x")', "TypeError", "'seconds' must be a number"),
        ('time.format(0, "Mars/Base")', "ValueError", "unknown time zone"),
        ("time.format(1e30)", "ValueError", "out of range"),
        *((f'time.parse("{text}")', "ValueError", "not a timestamp") for text in NOT_TIMESTAMPS),
        ("time.parse(1)", "TypeError", "'value'"),
        ("sys.get_env(1)", "TypeError", "'name' must be a string"),
        ('sys.get_env("X", 1)', "TypeError", "'default' must be a string"),
        ('events.create_callback_endpoint("BREW")', "ValueError", "unknown method 'BREW'"),
        ("events.create_callback_endpoint(1)", "TypeError", "must be a string"),
    ],
)
def test_refusal(lab: Any, expression: str, tag: str, message: str) -> None:
    error = lab.error(expression)
    assert error["tags"][0] == tag
    assert message in error["message"]


@pytest.mark.parametrize(
    ("error", "idempotent", "other"),
    [
        ({"code": 429}, True, True),
        ({"code": 502}, True, False),
        ({"code": 503}, True, True),
        ({"code": 504}, True, False),
        ({"code": 500}, False, False),
        ({"code": 404}, False, False),
        ({"tags": ["ConnectionError"]}, True, False),
        ({"tags": ["ConnectionFailedError"]}, True, True),
        ({"tags": ["TimeoutError"]}, True, False),
        ({"tags": ["KeyError"]}, False, False),
        ("text", False, False),
    ],
)
def test_default_retry_predicates(lab: Any, error: Any, idempotent: bool, other: bool) -> None:
    assert lab.value("http.default_retry_predicate(e)", e=error) is idempotent
    assert lab.value("http.default_retry_predicate_non_idempotent(e)", e=error) is other


def test_map_functions_copy(lab: Any) -> None:
    source = """
- init:
    assign:
      - a: {x: {y: 1}}
      - b: ${map.merge(a, a)}
      - b.x.y: 2
- done:
    return: ["${a}", "${b}"]
"""
    assert lab.run(source) == [{"x": {"y": 1}}, {"x": {"y": 2}}]


def test_a_callback_endpoint_has_the_services_shape(lab: Any) -> None:
    made = lab.value("events.create_callback_endpoint()")
    assert re.fullmatch(
        r"http://callbacks\.test/v1/projects/test-project/locations/europe-west4/workflows/flow/executions/e-1/callbacks/[\w-]+",
        made["url"],
    )


def test_functions_are_called_in_call_steps_too(lab: Any) -> None:
    source = """
- one: {call: text.split, args: {source: "a-b", separator: "-"}, result: parts}
- two: {call: sys.get_env, args: {name: TEAM}, result: team}
- three: {call: json.encode_to_string, args: {data: {k: [1]}, indent: {prefix: ">", indent: " "}}, result: text}
- four: {call: sys.log, args: {text: hello, severity: INFO}}
- done: {return: ["${parts}", "${team}", "${text}"]}
"""
    machine, result = lab.machine(source)
    assert result == [["a", "b"], "search", '{\n> "k": [\n>  1\n> ]\n>}']
    assert [(entry["severity"], entry["data"]) for entry in machine.logs] == [("INFO", "hello")]


def caught(call: str, arguments: str) -> str:
    """A source that returns the first tag of the call's error."""
    handler = "{as: e, steps: [{r: {return: '${e.tags[0]}'}}]}"
    return f"- t:\n    try: {{call: {call}, args: {arguments}}}\n    except: {handler}\n"


@pytest.mark.parametrize(
    ("arguments", "tag"),
    [
        ("{data: x, text: y}", "TypeError"),
        ("{}", "TypeError"),
        ("{data: null}", "TypeError"),
        ("{text: '${text.encode(\"x\")}'}", "TypeError"),
        ("{data: x, severity: LOUD}", "ValueError"),
        ("{data: x, severity: 5}", "TypeError"),
        ("{json: text}", "TypeError"),
    ],
)
def test_sys_log_refuses(lab: Any, arguments: str, tag: str) -> None:
    assert lab.run(caught("sys.log", arguments)) == tag


@pytest.mark.parametrize(
    ("call", "arguments", "tag"),
    [
        ("sys.sleep", {"seconds": "x"}, "TypeError"),
        ("sys.sleep", {"seconds": -1}, "ValueError"),
        ("sys.sleep", {"seconds": 40_000_000}, "ValueError"),
        ("sys.sleep_until", {"time": 5}, "TypeError"),
        *(("sys.sleep_until", {"time": text}, "ValueError") for text in NOT_TIMESTAMPS),
        ("events.await_callback", {"callback": 1}, "TypeError"),
        ("events.await_callback", {"callback": {"url": "http://other/callbacks/1"}}, "ValueError"),
        ("events.await_callback", {"callback": {"url": "x"}, "timeout": "long"}, "TypeError"),
        ("http.get", {"url": 5}, "TypeError"),
        ("http.get", {"url": "ftp://x"}, "ValueError"),
        ("http.get", {"url": "http://x", "timeout": 1801}, "ValueError"),
        ("http.get", {"url": "http://x", "timeout": "1"}, "TypeError"),
        ("http.get", {"url": "http://x", "headers": [1]}, "TypeError"),
        ("http.get", {"url": "http://x", "headers": {"a": {"b": 1}}}, "TypeError"),
        ("http.get", {"url": "http://x", "headers": {"a": "x\ny"}}, "ValueError"),
        ("http.get", {"url": "http://x", "query": "a=b"}, "TypeError"),
        ("http.get", {"url": "http://x", "auth": {"type": "Basic"}}, "ValueError"),
        ("http.request", {"url": "http://x", "method": "BREW"}, "ValueError"),
    ],
)
def test_blocking_calls_check_their_arguments(lab: Any, call: str, arguments: dict[str, Any], tag: str) -> None:
    assert lab.run(caught(call, json.dumps(arguments))) == tag


@pytest.mark.parametrize("time", ["2016-12-31t23:59:60z", "2017-01-01T01:00:00+01:00"])
def test_sleep_until_ends_at_the_timestamp(time: str) -> None:
    source = f"- nap: {{call: sys.sleep_until, args: {{time: '{time}'}}}}\n- now: {{return: '${{sys.now()}}'}}\n"
    assert simulate(source, clock=VirtualClock(1_480_000_000.0)).result == 1_483_228_800.0


def test_every_function_is_covered_here() -> None:
    text = Path(__file__).read_text()
    elsewhere = {"experimental.executions.run", "experimental.executions.map"}
    uncovered = {name for name in FUNCTIONS if name not in text and not name.startswith("http.")} - elsewhere
    assert uncovered <= {"int", "double", "string", "keys", "len", "default", "if", "get_type"}
