"""Cases from the pages of the service (cloud.google.com/workflows/docs/…), a line for each."""

from __future__ import annotations

from typing import Any

import pytest

from workflows_engine import DeployError, Limits, Machine, ScriptedMocks, compile_source, simulate, step_entry

# (page under reference/stdlib, expression, value)
DOCUMENTED: list[tuple[str, str, Any]] = [
    ("map/get", 'map.get(null, "a")', None),
    ("map/get", 'map.get([1], "a")', None),
    ("map/get", 'map.get("text", ["a", "b"])', None),
    ("map/get", 'default(map.get(map.get(m, "zz"), "y"), "none")', "none"),
    ("map/delete", 'map.delete(m, "zz")', {"key1": "hello", "key2": "world"}),
    ("text/find_all_regex", 'text.find_all_regex("ab", "a|ab")', [{"index": 0, "match": "ab"}]),
    (
        "text/find_all_regex",
        'text.find_all_regex("HelloWorld", "Hello|World")',
        [{"index": 0, "match": "Hello"}, {"index": 5, "match": "World"}],
    ),
    ("text/find_all_regex", 'text.find_all_regex("x", "y")', []),
    ("text/replace_all_regex", 'text.replace_all_regex("ab", "a|ab", "X")', "X"),
    ("text/replace_all_regex", 'text.replace_all_regex("héo", "", "-")', "-h-é-o-"),
    ("text/url_encode", 'text.url_encode("a/b/c?item=d+e f")', "a%2Fb%2Fc%3Fitem%3Dd%2Be%20f"),
    ("text/url_encode", 'text.url_encode("~.-_")', "%7E.-_"),
    ("text/url_encode_plus", 'text.url_encode_plus("a/b/c?item=d+e f~")', "a%2Fb%2Fc%3Fitem%3Dd%2Be+f%7E"),
    ("text/url_decode", 'text.url_decode("a%2Fb%2Fc%3Fitem%3Dd%2Be+f")', "a/b/c?item=d+e f"),
    ("time/format", 'time.format(1720788633, "GMT")', "2024-07-12T12:50:33.000000Z"),
    ("time/format", 'time.format(1720788633, "")', "2024-07-12T12:50:33.000000Z"),
    ("time/format", 'time.format(1720788633, "Europe/Paris")', "2024-07-12T14:50:33.000000+02:00"),
    ("base64/decode", 'text.decode(base64.decode("aGVs\\r\\nbG8="))', "hello"),
    ("json/encode_to_string", "json.encode_to_string([1], false)", "[1]"),
    ("hash/compute_checksum", 'base64.encode(hash.compute_checksum(text.encode("Hello World"), "SHA256"))',
     "pZGm1Av0IEBKARczz7exkNYsZb8LzaMrV7J32a2fFG4="),
    ("expression-helpers", 'double("-1.5e3")', -1500.0),
]  # fmt: skip


@pytest.mark.parametrize(("page", "expression", "expected"), DOCUMENTED)
def test_documented_value(lab: Any, page: str, expression: str, expected: Any) -> None:
    assert lab.value(expression, m={"key1": "hello", "key2": "world"}) == expected


@pytest.mark.parametrize(
    ("expression", "tag"),
    [
        ('base64.decode("aGVsbG8")', "ValueError"),  # padding is expected
        ('base64.encode(text.encode("a"), "no")', "TypeError"),
        ('double(" 1 ")', "ValueError"),
        ('double("nan")', "ValueError"),
        ("map.delete(m, 1)", "TypeError"),
        ('text.url_decode("100%")', "ValueError"),
    ],
)
def test_documented_error(lab: Any, expression: str, tag: str) -> None:
    assert lab.error(expression, m={})["tags"][0] == tag


FUNCTION = "f:\n  params: [a, b, c: 7]\n  steps: [{r: {return: '${[a, b, c]}'}}]\n"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("call: text.split, args: ['a b', ' '], result: r", ["a", "b"]),
        ("call: f, args: [1, '${1 + 1}'], result: r", [1, 2, 7]),
        ("call: f, args: [1, null, {x: 2}], result: r", [1, None, {"x": 2}]),
        ("call: sys.log, args: ['${null}', ERROR, hello], result: r", None),
        ("call: sys.get_env, args: [NOTHING, fallback], result: r", "fallback"),
    ],
)
def test_call_steps_take_lists_of_arguments(lab: Any, call: str, expected: Any) -> None:
    """Documented with sys.log: `args: [${myVar}, "ERROR"]`."""
    assert lab.run(f"main:\n  steps:\n    - a: {{{call}}}\n    - b: {{return: '${{r}}'}}\n{FUNCTION}") == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("call: text.to_upper, args: [a, b]", "text.to_upper takes 1 arguments; got 2"),
        ("call: f, args: [1]", "f needs argument 'b'"),
        ("call: f, args: text", "'args' must be a map from parameter names to values, or a list of values"),
        ("call: googleapis.storage.v1.buckets.list, args: [p]", "needs its arguments by name"),
    ],
)
def test_wrong_lists_of_arguments_are_refused(call: str, message: str) -> None:
    with pytest.raises(DeployError) as caught:
        compile_source(f"main:\n  steps:\n    - a: {{{call}}}\n{FUNCTION}", Limits())
    assert any(message in problem.message for problem in caught.value.problems)


def test_the_error_of_an_unknown_symbol_has_the_services_words() -> None:
    """The troubleshooting page has this sentence."""
    source = "main:\n  steps:\n    - step1: {assign: [{varA: 1}]}\n    - step2: {return: '${varA + varC}'}\n"
    with pytest.raises(DeployError) as caught:
        compile_source(source, Limits())
    assert (
        "error in step step2: error evaluating return value: "
        "symbol 'varC' is neither a variable nor a sub-workflow name (Code: 3)" in str(caught.value)
    )


def test_current_steps_names_only_the_innermost_step() -> None:
    """The API: "Presently, if the current step is inside a subworkflow, the list only includes that step"."""
    inner = "inner:\n  steps:\n    - nap: {call: sys.sleep, args: {seconds: 1}}\n    - boom: {raise: x}\n"
    program, _ = compile_source(f"main:\n  steps:\n    - work: {{call: inner}}\n{inner}", Limits())
    machine = Machine(
        program, execution="e", environment={}, callback_base_url="", limits=Limits(), now=lambda: 1_750_000_000.0
    )
    machine.start(None)
    machine.run()
    assert machine.current_steps() == [{"routine": "inner", "step": "nap"}]
    machine.complete(0, 1, None)
    machine.run()
    assert machine.current_steps() == [{"routine": "inner", "step": "boom"}]


def test_step_entries_of_retries_and_of_main() -> None:
    """Each attempt is a numbered TRY, which ends at its failure and not after the wait; entries link their siblings."""
    source = """
- try_it:
    try: {call: http.get, args: {url: "http://x/"}}
    retry: {predicate: "${retry.always}", max_retries: 1, backoff: {initial_delay: 5, max_delay: 5, multiplier: 1}}
- done: {return: 1}
"""
    mocks = ScriptedMocks([{"call": "http.get", "responses": [{"code": 503}, {"body": 1}]}])
    simulation = simulate(source, mocks=mocks)
    started = simulation.record.started or 0.0
    shown = [step_entry(entry, "e", lambda moment: round(moment - started)) for entry in simulation.entries]
    kinds = [
        (e["stepType"], e["createTime"], e["updateTime"], e["stepEntryMetadata"].get("progressNumber")) for e in shown
    ]
    assert kinds == [
        ("STEP_TRY_RETRY_EXCEPT", 0, 5, None),
        ("STEP_TRY", 0, 0, "1"),
        ("STEP_CALL", 0, 0, None),
        ("STEP_RETRY", 5, 5, "1"),
        ("STEP_TRY", 5, 5, "2"),
        ("STEP_CALL", 5, 5, None),
        ("STEP_RETURN", 5, 5, None),
    ]
    assert shown[0]["navigationInfo"] == {"children": ["2", "4", "5"], "next": "7"}
    assert shown[6]["navigationInfo"] == {"previous": "1"}


def test_the_error_of_a_result_without_json_names_its_step() -> None:
    record = simulate("- fine: {assign: [{x: 1}]}\n- r: {return: {a: '${text.encode(\"x\")}'}}\n").record
    assert record.error is not None
    assert record.error["context"].endswith('in step "r", routine "main", line: 2')
    assert record.error["stackTrace"]["elements"][0]["step"] == "r"
    assert record.current_steps == [{"routine": "main", "step": "r"}]
