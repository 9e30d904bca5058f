"""Mistakes that the compiler refuses, with line and column."""

from __future__ import annotations

import pytest

from workflows_engine import DeployError, Limits, compile_source


def problems(source: str, limits: Limits | None = None) -> list[tuple[int, int, str]]:
    try:
        compile_source(source, limits or Limits())
    except DeployError as error:
        return [(problem.line, problem.column, problem.message) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("source", "line", "column", "message"),
    [
        ("", 1, 1, "the source is empty"),
        ("text", 1, 1, "expected a list of steps, or a map with 'main'"),
        ("sub:\n  steps:\n    - a: {return: 1}\n", 1, 1, "expected a list of steps, or a map with 'main'"),
        ("main: {}\n", 1, 1, "'main' has no 'steps'"),
        ("main:\n  steps: []\n", 2, 10, "at least one step"),
        ("main:\n  step:\n    - a: {return: 1}\n  steps:\n    - a: {return: 1}\n", 2, 3, "unexpected 'step' in 'main'"),
        ("main:\n  params: [a, b]\n  steps:\n    - a: {return: 1}\n", 2, 11, "the limit is 1"),
        ("- a:\n    return: 1\n  b: 2\n", 1, 3, "a step must be a map with one key"),
        ("- a: 5\n", 1, 6, "a step must be a map"),
        ("- a: {}\n", 1, 6, "the step does nothing"),
        ("- a: {retrun: 1}\n", 1, 7, "unexpected 'retrun' in a step"),
        ("- a: {return: 1, raise: 2}\n", 1, 18, "a step has a single action; got: return and raise"),
        ("- a: {return: 1}\n- a: {return: 2}\n", 2, 3, "duplicate step name 'a'"),
        ("- end: {return: 1}\n", 1, 3, "'end' cannot be a step's name"),
        ("- a: {args: {}, assign: [{x: 1}]}\n", 1, 13, "'args' needs 'call'"),
        ("- a: {assign: {x: 1}}\n", 1, 15, "'assign' must be a list"),
        ("- a: {assign: [{x: 1, y: 2}]}\n", 1, 16, "an assignment must be a map with one key"),
        ("- a: {assign: [{x-y: 1}]}\n", 1, 17, "cannot assign to 'x-y'"),
        ("- a: {assign: [{x.y: 1}]}\n", 1, 17, "symbol 'x' is neither a variable nor a sub-workflow name"),
        ("- a: {next: nowhere}\n", 1, 13, "'next: nowhere' names no step"),
        ("- a: {next: break}\n", 1, 13, "is possible only in a loop"),
        ("- a: {call: nothing}\n", 1, 13, "symbol 'nothing' is neither a function nor a sub-workflow name"),
        ("- a: {call: http.fetch}\n", 1, 13, "symbol 'http.fetch'"),
        ("- a: {call: http.get}\n", 1, 13, "http.get needs argument 'url'"),
        ("- a: {call: http.get, args: {url: u, colour: 1}}\n", 1, 46, "http.get has no parameter 'colour'"),
        ("- a: {call: '${x}'}\n", 1, 13, "'call' must be the name"),
        ("- a: {switch: {}}\n", 1, 15, "'switch' must be a list"),
        ("- a: {switch: [{return: 1}]}\n", 1, 16, "must be a map with 'condition'"),
        ("- a: {switch: [{condition: 5}]}\n", 1, 28, "'condition' must be an expression or a boolean"),
        ("- a: {for: {in: [1], steps: [{b: {next: end}}]}}\n", 1, 12, "'for' needs 'value'"),
        ("- a: {for: {value: v, steps: [{b: {next: end}}]}}\n", 1, 12, "either 'in' or 'range'"),
        ("- a: {for: {value: v, in: [1]}}\n", 1, 12, "'for' needs 'steps'"),
        ("- a: {for: {value: v, range: [1], steps: [{b: {next: end}}]}}\n", 1, 30, "'range' must be a list of two"),
        ("- a: {try: {raise: x}}\n", 1, 12, "'try' needs 'retry' or 'except'"),
        ("- a: {try: {raise: x}, retry: 5}\n", 1, 31, "'retry' must be a policy"),
        (
            "- a: {try: {for: {value: v, in: [1], steps: [{b: {next: end}}]}}, except: {as: e}}\n",
            1,
            12,
            "loop step name should not be empty (Code: 3)",
        ),
        ("- a: {parallel: {}}\n", 1, 17, "either 'branches' or 'for'"),
        (
            "- a: {parallel: {exception_policy: abort, for: {value: v, in: [1], steps: [{b: {next: end}}]}}}\n",
            1,
            36,
            "must be continueAll",
        ),
        (
            "- a: {parallel: {branches: [{b: {steps: [{c: {assign: [{x: 1}]}}]}}]}}\n",
            1,
            28,
            "1 branches; expected 2 to 10",
        ),
        (
            "- a: {parallel: {for: {value: v, in: [1], steps: [{b: {return: 1}}]}}}\n",
            1,
            52,
            "'return' cannot be used inside a parallel step",
        ),
        (
            "- a: {parallel: {shared: [x], for: {value: v, in: [1], steps: [{b: {next: end}}]}}}\n",
            1,
            27,
            "shared variable 'x' is not defined",
        ),
        ("- a: {call: f}\n- b: {return: &x [*x]}\n", 2, 19, "alias *x names no finished anchor"),
        ("- a: {return: !custom 1}\n", 1, 15, "tag '!custom' is not supported"),
        ("- a: [\n", 2, 1, "parse error"),
        ("- a: {return: 1}\n---\n- b: {return: 2}\n", 2, 1, "expected one document"),
        ("- a: {return: {x: 1, x: 2}}\n", 1, 22, "duplicate key 'x'"),
    ],
)
def test_mistake(source: str, line: int, column: int, message: str) -> None:
    reported = problems(source)
    assert any((at, column_) == (line, column) and message in text for at, column_, text in reported), reported


def test_all_mistakes_are_listed_in_order() -> None:
    reported = problems("- a: {return: '${x}'}\n- b: {next: c}\n- d: {call: nothing}\n")
    assert [line for line, _, _ in reported] == [1, 2, 3]


SCOPES = """
main:
  steps:
    - init: {assign: [{shared: 0}, {parent: 0}]}
    - loop:
        for:
          value: v
          in: [1]
          steps:
            - set: {assign: [{local: 1}]}
    - t:
        try: {raise: x}
        except:
          as: e
          steps:
            - set: {assign: [{handled: 1}]}
    - p:
        parallel:
          shared: [shared]
          branches:
            - one: {steps: [{a: {assign: [{mine: 1}, {shared: 1}]}}]}
            - two: {steps: [{a: {assign: [%s]}}]}
    - done: {return: %s}
"""


@pytest.mark.parametrize(
    ("inside", "returned", "message"),
    [
        ("{other: 1}", "'${shared}'", ""),
        ("{mine: 2}", "1", ""),
        ("{other: '${parent}'}", "1", ""),
        ("{parent: 1}", "1", "variable 'parent' is assigned in a parallel step, but is not in its 'shared' list"),
        ("{parent.x: 1}", "1", "variable 'parent' is assigned in a parallel step"),
        ("{other: '${mine}'}", "1", "symbol 'mine' is neither"),
        ("{other: 1}", "'${local}'", "symbol 'local' is neither"),
        ("{other: 1}", "'${v}'", "symbol 'v' is neither"),
        ("{other: 1}", "'${e}'", "symbol 'e' is neither"),
        ("{other: 1}", "'${handled}'", "symbol 'handled' is neither"),
        ("{other: 1}", "'${other}'", "symbol 'other' is neither"),
    ],
)
def test_scopes(inside: str, returned: str, message: str) -> None:
    reported = problems(SCOPES % (inside, returned))
    assert bool(reported) is bool(message)
    assert all(message in text for _, _, text in reported)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("for: {value: v, in: [1], steps: [{x: {next: after}}]}", "names no step of this list or one around it"),
        ("parallel: {for: {value: v, in: [1], steps: [{x: {next: after}}]}}", "names no step"),
        ("parallel: {for: {value: v, in: [1], steps: [{x: {next: break}}]}}", "is possible only in a loop"),
        ("steps: [{x: {next: hidden}}]", "names no step"),
        (
            "for: {value: v, in: [1], steps: [{y: {for: {value: v, in: [1], steps: [{z: {next: end}}]}}}]}",
            "already used",
        ),
    ],
)
def test_impossible_jumps_are_refused(body: str, message: str) -> None:
    reported = problems(f"- first:\n    {body}\n- after:\n    steps: [{{hidden: {{return: 1}}}}]\n")
    assert len(reported) == 1
    assert message in reported[0][2]


def test_jumps_out_of_except_and_try_are_accepted() -> None:
    source = """
- t:
    try:
      steps:
        - a: {next: after}
    except:
      as: e
      steps:
        - b: {switch: [{condition: true, next: other}]}
- other: {return: 1}
- after: {return: 2}
"""
    assert problems(source) == []


def test_limits_of_size_are_enforced_and_can_be_lifted() -> None:
    assignments = ", ".join("{x: 1}" for _ in range(51))
    conditions = ", ".join("{condition: true, next: end}" for _ in range(51))
    branches = ", ".join(f"{{b{n}: {{steps: [{{s: {{assign: [{{x: 1}}]}}}}]}}}}" for n in range(11))
    parameters = ", ".join(f"p{n}" for n in range(11))
    main = "main:\n  steps:\n    - a: {return: 1}\n"
    sources = {
        f"- a: {{assign: [{assignments}]}}\n": "51 assignments in one step; the limit is 50",
        f"- a: {{switch: [{conditions}]}}\n": "51 conditions in one switch; the limit is 50",
        f"- a: {{parallel: {{branches: [{branches}]}}}}\n": "11 branches; expected 2 to 10",
        f"{main}sub:\n  params: [{parameters}]\n  steps:\n    - a: {{return: 1}}\n": "11 parameters; the limit is 10",
        "- a: {return: '" + "x" * 131_072 + "'}\n": "the limit is 131072",
        "- a: {return: '${" + "1 + " * 100 + "1}'}\n": "an expression of 401 characters; the limit is 400",
    }
    for source, message in sources.items():
        assert message in problems(source)[0][2]
        assert problems(source, Limits.lifted()) == []


def test_the_expansion_of_aliases_is_limited() -> None:
    lines = ["- a:", "    assign:", "      - x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"      - x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 8)}]" for n in range(1, 12)]
    assert "expands to more than" in problems("\n".join(lines))[0][2]


def test_text_with_an_inner_expression_gets_a_warning() -> None:
    _, warnings = compile_source("- a: {return: 'hello ${x} there'}\n", Limits())
    assert [(warning.severity, warning.line) for warning in warnings] == [("warning", 1)]


@pytest.mark.parametrize(
    ("before", "lines"),
    [("- zero: {assign: [{other: 0}]}\n", [6]), ("- zero: {assign: [{x: null}]}\n", [])],
)
def test_a_variable_that_a_try_creates_and_its_except_assigns_gets_a_warning(before: str, lines: list[int]) -> None:
    """https://cloud.google.com/workflows/docs/reference/syntax/catching-errors#variable-scope"""
    source = f"""\
{before}- one:
    try: {{call: http.get, args: {{url: a}}, result: x}}
    except:
        as: e
        steps: [{{two: {{assign: [{{x: 1}}, {{own: 2}}]}}}}]
- three: {{return: '${{x}}'}}
"""
    _, warnings = compile_source(source, Limits())
    found = [(warning.severity, warning.line, warning.message) for warning in warnings]
    assert [(severity, line) for severity, line, _ in found] == [("warning", line) for line in lines]
    assert all("assign 'x' before the try" in message for *_, message in found)
