"""The expression language: operators, precedence, conversions, helpers, and the errors' tags and messages."""

from __future__ import annotations

from typing import Any

import pytest

from workflows_engine import DeployError


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 2 - 3", 5),
        ("2 * 6 / 4", 3.0),
        ("8 / 2", 4.0),
        ("7 // 2", 3),
        ("-7 // 2", -4),
        ("7.5 // 2", 3.0),
        ("7 % 3", 1),
        ("-7 % 3", 2),
        ("7.5 % 2", 1.5),
        ("-3 + 5", 2),
        ("- 3 - -3", 0),
        ("1 + 2.5", 3.5),
        ("1e3", 1000.0),
        (".5 + 1", 1.5),
        ('"n=" + 5', "n=5"),
        ('5 + "n"', "5n"),
        ('"x" + 1.5', "x1.5"),
        ('"x" + 2.0', "x2.0"),
        ('"x" + true', "xtrue"),
        ('false + "x"', "falsex"),
        ('1 + 2 + "x" + 1 + 2', "3x12"),
        ("1 < 2", True),
        ("2 <= 2.0", True),
        ("3 > 4", False),
        ("3 >= 4", False),
        ('"a" < "b"', True),
        ('"B" < "a"', True),
        ("1 == 1.0", True),
        ("1 == true", False),
        ('1 == "1"', False),
        ("null == null", True),
        ("null == 0", False),
        ("null != false", True),
        ("[1, [2]] == [1.0, [2]]", True),
        ("[1] == [true]", False),
        ('"a" in ["a", 1]', True),
        ("1 in [true]", False),
        ("not true", False),
        ("not(1 == 2)", True),
        ("not not true", True),
        ("not false == true", True),
        ("true and false or true", True),
        ("true or false and false", True),
        ("TRUE AND NOT FALSE", True),
        ("False OR True", True),
        ("1 + 1 == 2 and 2 > 1", True),
        ("[1, 2 + 3, [4]]", [1, 5, [4]]),
        ("[]", []),
        ('"a\\"b\\n"', 'a"b\n'),
        ("'single'", "single"),
        ('"ä" + "€"', "ä€"),
        ('"\\u00e9"', "é"),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("true or 1 / 0 == 1", True),
        ("false and 1 / 0 == 1", False),
        ('if(true, "a", "b")', "a"),
        ('if(false, "a", "b")', "b"),
        ('if(null, "a", "b")', "b"),
        ('default(null, "d")', "d"),
        ('default(false, "d")', False),
        ('default("", "d")', ""),
        ("int(2.7)", 2),
        ("int(-2.7)", -2),
        ('int("42")', 42),
        ('int("-42")', -42),
        ("int(7)", 7),
        ('double("2.7")', 2.7),
        ("double(2)", 2.0),
        ("string(1.7)", "1.7"),
        ("string(5)", "5"),
        ("string(true)", "true"),
        ('string("x")', "x"),
        ('len("häß")', 3),
        ("len([1, 2])", 2),
        ("get_type(1)", "integer"),
        ("get_type(1.0)", "double"),
        ('get_type("")', "string"),
        ("get_type(true)", "boolean"),
        ("get_type([])", "list"),
        ("get_type(null)", "null"),
        ('get_type(text.encode("x"))', "bytes"),
        ("[10, 20, 30][1]", 20),
        ("[[1, 2], [3]][0][1]", 2),
    ],
)
def test_value(lab: Any, expression: str, expected: Any) -> None:
    value = lab.value(expression)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("m.a", 1),
        ('m["special!key"]', 2),
        ("m[k]", 1),
        ("m.inner.list[1].x", "deep"),
        ('"a" in m', True),
        ('"zz" in m', False),
        ("keys(m)", ["a", "special!key", "inner"]),
        ("len(m)", 3),
        ("m.inner == m.inner", True),
        ("get_type(m)", "map"),
        ("not k in m", None),
    ],
)
def test_maps(lab: Any, expression: str, expected: Any) -> None:
    m = {"a": 1, "special!key": 2, "inner": {"list": [0, {"x": "deep"}]}}
    if expected is None:  # `not` binds tighter than `in`: (not k) in m
        assert lab.error(expression, m=m, k="a")["tags"] == ["TypeError"]
    else:
        assert lab.value(expression, m=m, k="a") == expected


@pytest.mark.parametrize(
    ("expression", "tag", "message"),
    [
        ("1 / 0", "ZeroDivisionError", "division by zero"),
        ("1 // 0", "ZeroDivisionError", "division by zero"),
        ("1 % 0", "ZeroDivisionError", "division by zero"),
        ("1.5 / 0.0", "ZeroDivisionError", "division by zero"),
        ("1 + true", "TypeError", "unsupported operand types for '+': integer and boolean"),
        ("true + false", "TypeError", "unsupported operand types for '+'"),
        ('"x" + null', "TypeError", "string and null"),
        ('"x" + [1]', "TypeError", "string and list"),
        ("[1] + [2]", "TypeError", "list and list"),
        ('"x" * 2', "TypeError", "'*'"),
        ('"x" - "y"', "TypeError", "'-'"),
        ('1 < "2"', "TypeError", "'<'"),
        ("null > 1", "TypeError", "'>'"),
        ("true < false", "TypeError", "'<'"),
        ("not 1", "TypeError", "must be a boolean"),
        ('not ""', "TypeError", "must be a boolean"),
        ("1 and true", "TypeError", "must be a boolean"),
        ("true and 1", "TypeError", "must be a boolean"),
        ("null or true", "TypeError", "must be a boolean"),
        ('-"x"', "TypeError", "unary '-'"),
        ("1 in null", "TypeError", "The argument of 'in' must be a dict or an array; got: null"),
        ('"a" in "abc"', "TypeError", "The argument of 'in' must be a dict or an array; got: string"),
        ("[1][1]", "IndexError", "index out of range [1] with length 1"),
        ("[1][-1]", "IndexError", "index out of range [-1]"),
        ("[1][1.0]", "TypeError", "list index must be an integer"),
        ('[1]["a"]', "TypeError", "list index must be an integer"),
        ("null.a", "TypeError", "cannot read field 'a' of null"),
        ("null[0]", "TypeError", "cannot index null"),
        ("9223372036854775807 + 1", "ValueError", "integer overflow"),
        ("4611686018427387904 * 2", "ValueError", "integer overflow"),
        ('int("abc")', "ValueError", "cannot convert 'abc'"),
        ('int("2.5")', "ValueError", "cannot convert"),
        ("int(null)", "TypeError", "got: null"),
        ("int(true)", "TypeError", "got: boolean"),
        ("int(1e30)", "ValueError", "64-bit"),
        ('double("x")', "ValueError", "cannot convert"),
        ("double([])", "TypeError", "got: list"),
        ("string(null)", "TypeError", "got: null"),
        ("string([1])", "TypeError", "got: list"),
        ("len(1)", "TypeError", "got: integer"),
        ("len(null)", "TypeError", "got: null"),
        ("keys([1])", "TypeError", "got: list"),
        ('if("x", 1, 2)', "TypeError", "must be a boolean or null"),
    ],
)
def test_error(lab: Any, expression: str, tag: str, message: str) -> None:
    error = lab.error(expression)
    assert error["tags"][0] == tag
    assert error["message"].startswith(f"{tag}: ")
    assert message in error["message"]


def test_the_error_of_a_missing_key_names_the_key(lab: Any) -> None:
    error = lab.error("m.b", m={"a": 1})
    assert error == {"message": "KeyError: key not found: b", "tags": ["KeyError", "LookupError"]}
    assert lab.error('m["c d"]', m={})["message"] == "KeyError: key not found: c d"
    assert lab.error("m[1]", m={"1": 1})["tags"] == ["TypeError"]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "the expression is empty"),
        ("1 +", "unexpected the end"),
        ("a b", "unexpected 'b'"),
        ("x not in y", "write not(x in y)"),
        ("{a: 1}", "a map cannot be written inside an expression"),
        ("1 And 2", "unexpected"),
        ("(1", "unexpected the end"),
        ("f(1)(2)", "only a named function"),
        ("'open", "unexpected"),
        ("a = 1", "unexpected"),
        ("1 ? 2 : 3", "unexpected"),
        ("unknown", "symbol 'unknown' is neither a variable nor a sub-workflow name"),
        ("unknown(1)", "symbol 'unknown' is neither a function nor a sub-workflow name"),
        ("text.nothing(1)", "symbol 'text.nothing'"),
        ("text.nothing", "is not a function of the standard library"),
        ("len()", "len takes 1 arguments; got 0"),
        ("text.substring(1, 2)", "takes 3 arguments"),
        ('http.get("http://x")', "blocks and cannot be used in an expression"),
        ("sys.sleep(1)", "blocks and cannot be used"),
        ("events.await_callback(1)", "blocks and cannot be used"),
        ("googleapis.run.v2.projects.locations.jobs.run(1)", "blocks and cannot be used"),
        ("type(1)", "symbol 'type' is neither"),
        ("bool(1)", "symbol 'bool' is neither"),
        ('map.get({}, "a", 1)', "a map cannot be written"),
        ('map.get([], "a", 1)', "map.get takes 2 arguments; got 3"),
        ("1 + " * 101 + "1", "the limit is 400"),
    ],
)
def test_the_compiler_refuses_a_mistake(lab: Any, expression: str, message: str) -> None:
    with pytest.raises(DeployError) as caught:
        lab.value(expression)
    assert message in str(caught.value)
    assert caught.value.problems[0].line == 5


def test_an_expression_is_the_whole_scalar(lab: Any) -> None:
    assert lab.run("- a:\n    return: hello-${world}\n") == "hello-${world}"
    with pytest.raises(DeployError, match="one whole"):
        lab.run("- a:\n    return: ${1}-${2}\n")


def test_an_expression_may_span_lines(lab: Any) -> None:
    source = '- a:\n    return: ${\n      "SELECT * from customers\\n" +\n      "WHERE id=" + 7\n      }\n'
    assert lab.run(source) == "SELECT * from customers\nWHERE id=7"


def test_subworkflows_are_called_in_expressions(lab: Any) -> None:
    source = """
main:
  steps:
    - init:
        assign:
          - calls: 0
    - done:
        return:
          - ${add(1, 2) + add(add(1, 1), 10)}
          - ${true or fail()}
          - ${false and fail()}
          - '${if(add(1, 1) == 2, add(1), "no")}'
          - key: ${add(5)}
add:
  params: [a, b: 100]
  steps:
    - wait: {call: sys.sleep, args: {seconds: 1}}
    - sum: {return: "${a + b}"}
fail:
  steps:
    - no: {raise: "not to be called"}
"""
    assert lab.run(source) == [15, True, False, 101, {"key": 105}]
