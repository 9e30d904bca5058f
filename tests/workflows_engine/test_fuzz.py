"""Random sources and programs: the compiler refuses them, or they run to an end, without a crash or a hang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workflows_engine import DeployError, Limits, Machine, Program, compile_source
from workflows_engine.language import stdlib

from .conftest import run_to_end

LIMITS = Limits(steps=3000)
QUIET = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

NAMES = st.sampled_from(["a", "b", "c", "args", "e", "i", "map", "list", "main", "sub", "end", "no"])
NUMBERS = st.sampled_from(["0", "1", "-1", "2", "3.5", "1e308", "9223372036854775807", "-9223372036854775808"])
STRINGS = st.sampled_from(['""', '"x"', '"a b"', '"ü\\n"', '"k"', '"1"', '"2024-01-01T00:00:00Z"', '"("', '"%41"'])
LITERALS = NUMBERS | STRINGS | st.sampled_from(["true", "false", "null", "[]", "[1, [2]]"])
OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%", "==", "!=", "<", "<=", ">", ">=", "in", "and", "or"])
PURE = sorted(name for name, signature in stdlib.FUNCTIONS.items() if signature.style != "blocking")


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, OPERATORS, inner).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
        inner.map(lambda e: f"({e})"),
        inner.map(lambda e: f"not({e})"),
        inner.map(lambda e: f"-({e})"),
        st.tuples(NAMES, inner).map(lambda t: f"{t[0]}[{t[1]}]"),
        st.tuples(NAMES, NAMES).map(lambda t: f"{t[0]}.{t[1]}"),
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.tuples(st.sampled_from(PURE), st.lists(inner, max_size=3)).map(lambda t: f"{t[0]}({', '.join(t[1])})"),
        st.lists(inner, max_size=2).map(lambda items: f"sub({', '.join(items)})"),
    )


EXPRESSIONS = st.recursive(LITERALS | NAMES, _compound, max_leaves=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    EXPRESSIONS.map(lambda e: "${" + e + "}") | st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
TARGETS = NAMES | st.tuples(NAMES, EXPRESSIONS).map(lambda t: f"{t[0]}[{t[1]}]") | st.just("a.b.c")


def _bodies(steps: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    loop = st.fixed_dictionaries(
        {"value": NAMES, "steps": steps},
        optional={"index": NAMES, "in": VALUES, "range": st.lists(VALUES, min_size=2, max_size=2)},
    )
    calls = st.sampled_from(
        ["sub", "sys.log", "sys.sleep", "http.get", "events.await_callback", "list.concat", "nothing"]
    )
    return st.one_of(
        st.fixed_dictionaries(
            {"assign": st.lists(st.dictionaries(TARGETS, VALUES, min_size=1, max_size=1), max_size=4)}
        ),
        st.fixed_dictionaries(
            {"call": calls},
            optional={
                "args": st.dictionaries(NAMES | st.sampled_from(["url", "seconds", "data", "x"]), VALUES, max_size=2),
                "result": TARGETS,
            },
        ),
        st.fixed_dictionaries(
            {
                "switch": st.lists(
                    st.fixed_dictionaries(
                        {"condition": VALUES}, optional={"next": NAMES, "steps": steps, "return": VALUES}
                    ),
                    max_size=3,
                )
            },
            optional={"next": NAMES},
        ),
        st.fixed_dictionaries({"for": loop}, optional={"next": NAMES}),
        st.fixed_dictionaries(
            {
                "parallel": st.fixed_dictionaries(
                    {},
                    optional={
                        "for": loop,
                        "shared": st.lists(NAMES, max_size=3),
                        "concurrency_limit": VALUES,
                        "branches": st.lists(st.dictionaries(NAMES, steps, min_size=1, max_size=1), max_size=3),
                    },
                )
            }
        ),
        st.fixed_dictionaries(
            {"try": st.fixed_dictionaries({"steps": steps})},
            optional={
                "except": st.fixed_dictionaries({"as": NAMES, "steps": steps}),
                "retry": st.sampled_from(["${http.default_retry}", {"predicate": "${sub}", "max_retries": 2}, "${a}"]),
            },
        ),
        st.fixed_dictionaries({"raise": VALUES}),
        st.fixed_dictionaries({"return": VALUES}),
        st.fixed_dictionaries({"steps": steps}),
        st.fixed_dictionaries({"next": NAMES | st.sampled_from(["break", "continue"])}),
    )


ASSIGNMENTS = st.lists(st.dictionaries(NAMES, VALUES, min_size=1, max_size=1), min_size=1, max_size=3)
STEPS: st.SearchStrategy[Any] = st.recursive(
    st.lists(
        st.dictionaries(
            NAMES,
            st.fixed_dictionaries(
                {"assign": st.lists(st.dictionaries(NAMES, VALUES, min_size=1, max_size=1), min_size=1, max_size=3)}
            ),
            min_size=1,
            max_size=1,
        ),
        min_size=1,
        max_size=3,
    ),
    lambda inner: st.lists(st.dictionaries(NAMES, _bodies(inner), min_size=1, max_size=1), min_size=1, max_size=4),
    max_leaves=8,
)


def new_machine(program: Program) -> Machine:
    return Machine(
        program,
        execution="projects/p/locations/l/workflows/w/executions/e",
        environment={},
        callback_base_url="",
        limits=LIMITS,
        now=lambda: 1.75e9,
    )


def run(source: str) -> str:
    """The state in which the source ends, or "refused"; checks every snapshot on the way."""
    try:
        program, _ = compile_source(source, LIMITS)
    except DeployError as error:
        placed = [problem for problem in error.problems if problem.line >= 1 and problem.column >= 1]
        return "refused" if len(placed) == len(error.problems) else "misplaced"
    machine = new_machine(program)
    machine.start({"a": 1})
    stored: dict[int, str] = {}
    for _ in range(50):
        machine.run(200)
        if machine.outcome is not None:
            break
        state, added, removed = machine.snapshot()
        stored = {key: text for key, text in {**stored, **added}.items() if key not in removed}
        restored = new_machine(program)
        restored.restore(state, stored)
        assert restored.snapshot() == (state, {}, [])
        waits, machine.waits = machine.waits, []
        for wait in waits:
            machine.complete(wait.thread, wait.seq, None)
    state, value = run_to_end(machine)
    if state == "FAILED":
        assert "SystemError" not in value["payload"], value["context"]
    return state


@given(st.text(max_size=300))
@QUIET
def test_random_text(text: str) -> None:
    assert run(text) != "misplaced"


@given(st.text(alphabet="{}[]:,-&*!|>'\"%@`#? \n\tab01$()", max_size=200))
@QUIET
def test_random_yaml_punctuation(text: str) -> None:
    assert run(text) != "misplaced"


@given(st.text(alphabet="()[]{}.,+-*/%<>=!\"'\\ abc01truenotinador", max_size=80))
@QUIET
def test_random_expressions(text: str) -> None:
    assert run(f"- a:\n    return: {json.dumps('${' + text + '}')}\n") != "misplaced"


@given(STEPS, STEPS)
@settings(QUIET, max_examples=400)
def test_random_programs(main: Any, sub: Any) -> None:
    variables = {"init": {"assign": [{"a": 1}, {"b": [1, 2]}, {"c": {"k": 1}}]}}
    source = {
        "main": {"params": ["args"], "steps": [variables, *main]},
        "sub": {"params": [{"x": None}, {"a": 1}], "steps": sub},
    }
    assert run(json.dumps(source)) != "misplaced"


@given(EXPRESSIONS)
@settings(QUIET, max_examples=400)
def test_random_expressions_of_the_grammar(expression: str) -> None:
    source = {
        "main": {"params": ["args"], "steps": [{"r": {"return": "${" + expression + "}"}}]},
        "sub": {"params": [{"x": None}, {"a": 1}], "steps": [{"r": {"return": "${x}"}}]},
    }
    assert run(json.dumps(source)) != "misplaced"


@pytest.mark.parametrize(
    "source",
    [
        "[" * 131_000,
        "{a: " * 30_000,
        "- a:\n    return: ${" + "(" * 180 + "1" + ")" * 180 + "}\n",
        "- a:\n    return: ${" + "-" * 190 + "x}\n",
        "- a:\n    return: ${" + "not " * 90 + "true}\n",
        "- a:\n    return: ${" + "1+" * 198 + "1}\n",
        "- a:\n    return: ${" + "[" * 180 + "]" * 180 + "}\n",
        "- a:\n    return: ${" + "len(" * 90 + ")" * 90 + "}\n",
        "- a: &x\n    return: *x\n",
        "\ud800",
        '- a:\n    return: "\\ud800"\n',
        "main:\n  steps:\n" + "".join(f"{'  ' * n}  - s{n}:\n{'  ' * n}      steps:\n" for n in range(2, 40)),
        "- a: {for: {value: v, range: [1, 1e300], steps: [{b: {next: continue}}]}}\n",
        "- a: {for: {value: v, range: [-9223372036854775808, 9223372036854775807], steps: [{b: {next: continue}}]}}\n",
        "- a: {parallel: {for: {value: v, range: [1, 1000000000], steps: [{b: {raise: x}}]}}}\n",
        "- a: {call: sys.sleep, args: {seconds: 1e308}}\n",
        "main:\n  steps:\n    - a: {call: main}\n",
        "main:\n  steps:\n    - a: {return: '${main()}'}\n",
        "- a: {assign: [{x: '${[[[[1]]]]}'}, {x: '${[x, x, x, x, x, x, x, x]}'}, {y: '${x == x}'}], next: a}\n",
    ],
)
def test_nasty_sources(source: str) -> None:
    assert run(source) != "misplaced"
