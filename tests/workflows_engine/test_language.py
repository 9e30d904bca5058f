"""Steps and scopes: the effect of every construct, and its errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from workflows_engine import Limits, ScriptedMocks, simulate

from .conftest import Failed, duration


def failure(lab: Any, source: str, argument: Any = None, **options: Any) -> Any:
    """The error value of a source that fails, and the error as the API shows it."""
    with pytest.raises(Failed) as caught:
        lab.run(source, argument, **options)
    return caught.value.value, caught.value.error


# assign


def test_assignments_run_in_order_and_reach_into_values(lab: Any) -> None:
    source = """
main:
  params: [args]
  steps:
    - all:
        assign:
          - a: 1
          - b: ${a + 1}
          - list: [0, [1, 2], {k: v}]
          - list[0]: ${b}
          - list[1][a]: changed
          - list[2].k: ${list[0]}
          - map: {}
          - map.x: 1
          - map["special!key"]: 2
          - map[args.name]: 3
          - map.deep.er: 4
          - copy: ${map}
          - copy.x: 9
    - done:
        return: ["${list}", "${map}", "${copy.x}"]
"""
    result = lab.run(source, {"name": "dynamic"})
    assert result == [
        [2, [1, "changed"], {"k": 2}],
        {"x": 1, "special!key": 2, "dynamic": 3, "deep": {"er": 4}},
        9,
    ]


@pytest.mark.parametrize(
    ("assignment", "tag", "message"),
    [
        ("list[5]: 1", "IndexError", "index out of range [5] with length 1"),
        ("list[-1]: 1", "IndexError", "index out of range [-1]"),
        ('list["a"]: 1', "TypeError", "list index must be an integer"),
        ("map[1]: 1", "TypeError", "map key must be a string"),
        ("number.x: 1", "TypeError", "cannot assign into integer"),
        ("map.n.x: 1", "TypeError", "cannot assign into integer"),
        ("map.zero.x: 1", "TypeError", "cannot assign into null"),
    ],
)
def test_wrong_assignments_fail(lab: Any, assignment: str, tag: str, message: str) -> None:
    values = "      - list: [0]\n      - map: {n: 1, zero: null}\n      - number: 1\n"
    source = f"- a:\n    assign:\n{values}      - {assignment}\n"
    value, error = failure(lab, source)
    assert value["tags"][0] == tag
    assert message in value["message"]
    assert error["context"].endswith('in step "a", routine "main", line: 1')


def test_map_keys_are_strings_and_may_be_expressions(lab: Any) -> None:
    source = "- a:\n    assign:\n      - k: x\n      - m: {1: a, true: b, '${k}': c, null: d}\n- b:\n    return: ${m}\n"
    assert lab.run(source) == {"1": "a", "true": "b", "x": "c", "null": "d"}


def test_yaml_is_read_by_the_core_schema(lab: Any) -> None:
    source = """
- no:
    assign:
      - yes: [no, on, off, y, True, FALSE, 0x1F, 0o17, 017, 1_000, 2024-01-01, 12:30:45, ~, Null, .inf, 1e3, "1"]
- done:
    return: [ "${yes[0]}", "${yes[4]}", "${yes[5]}", "${yes[6]}", "${yes[7]}", "${yes[8]}", "${yes[9]}", "${yes[10]}",
              "${yes[11]}", "${yes[12]}", "${yes[13]}", "${yes[15]}", "${yes[16]}" ]
"""
    assert lab.run(source) == [
        "no", True, False, 31, 15, 17, "1_000", "2024-01-01", "12:30:45", None, None, 1000.0, "1",
    ]  # fmt: skip


def test_json_is_a_source_too(lab: Any) -> None:
    returned = '{"x": "${args.n + 1}", "e": "\\ud83d\\ude00"}'
    source = '{\n\t"main": {"params": ["args"], "steps": [{"done": {"return": ' + returned + "}}]}}"
    assert lab.run(source, {"n": 1}) == {"x": 2, "e": "😀"}


# switch, next, steps


def test_switch_takes_the_first_true_condition(lab: Any) -> None:
    source = """
main:
  params: [n]
  steps:
    - choose:
        switch:
          - condition: ${n < 0}
            return: negative
          - condition: ${n == 0}
            next: zero
          - condition: ${n < 10}
            steps:
              - note:
                  assign:
                    - size: small
              - double:
                  assign:
                    - n: ${n * 2}
          - condition: ${n == 10}
            assign:
              - size: ten
            next: say
          - condition: ${n == 11}
            raise: eleven
          - condition: true
            call: describe
            args: {n: "${n}"}
            result: size
        next: say
    - zero:
        return: nothing
    - say:
        return: ${size + " " + n}
describe:
  params: [n]
  steps:
    - r: {return: "${\\"big\\"}"}
"""
    assert [lab.run(source, n) for n in (-1, 0, 4, 10, 50)] == ["negative", "nothing", "small 8", "ten 10", "big 50"]
    assert failure(lab, source, 11)[0] == "eleven"


def test_without_a_match_the_next_step_follows(lab: Any) -> None:
    source = "- a:\n    switch:\n      - condition: false\n        return: 1\n- b:\n    return: 2\n"
    assert lab.run(source) == 2


def test_a_condition_must_be_boolean(lab: Any) -> None:
    value, _ = failure(lab, "- a:\n    switch:\n      - condition: ${1}\n        return: 1\n")
    assert value == {"message": "TypeError: a condition must be a boolean; got: integer", "tags": ["TypeError"]}


def test_jumps_go_to_siblings_and_outwards(lab: Any) -> None:
    source = """
- init:
    assign: [{log: []}]
    next: third
- second:
    assign: [{log: "${list.concat(log, 2)}"}]
    next: block
- third:
    assign: [{log: "${list.concat(log, 3)}"}]
    next: second
- block:
    steps:
      - inner: {assign: [{log: "${list.concat(log, 4)}"}], next: leave}
      - skipped: {raise: "not reached"}
      - leave: {assign: [{log: "${list.concat(log, 5)}"}], next: last}
- not_reached: {raise: "not reached"}
- last: {return: "${log}"}
"""
    assert lab.run(source) == [3, 2, 4, 5]


def test_end_ends_the_routine_with_null(lab: Any) -> None:
    source = """
main:
  steps:
    - a: {call: sub, result: r}
    - b: {return: ["${r}", after]}
sub:
  steps:
    - stop: {next: end}
    - never: {raise: "not reached"}
"""
    assert lab.run(source) == [None, "after"]
    assert lab.run("- a:\n    assign: [{x: 1}]\n") is None


# for


def test_loops_over_lists_and_ranges(lab: Any) -> None:
    source = """
- init: {assign: [{seen: []}]}
- one:
    for:
      value: v
      index: i
      in: [a, b, "${1 + 1}"]
      steps:
        - note: {assign: [{seen: "${list.concat(seen, [i, v])}"}]}
- two:
    for:
      value: v
      range: [9, 11]
      steps:
        - note: {assign: [{seen: "${list.concat(seen, v)}"}]}
- three:
    for: {value: v, range: "${[1, len(seen)]}", steps: [{stop: {next: break}}]}
- four:
    for: {value: v, range: [5, 1], steps: [{no: {raise: "not reached"}}]}
- five:
    for: {value: v, range: [0.5, 2.6], steps: [{note: {assign: [{seen: "${list.concat(seen, v)}"}]}}]}
- done: {return: "${seen}"}
"""
    assert lab.run(source) == [[0, "a"], [1, "b"], [2, 2], 9, 10, 11, 0.5, 1.5, 2.5]


def test_break_and_continue(lab: Any) -> None:
    source = """
- init: {assign: [{seen: []}]}
- loop:
    for:
      value: v
      in: [1, 2, 3, 4, 5]
      steps:
        - check:
            switch:
              - condition: ${v == 2}
                next: continue
              - condition: ${v == 4}
                next: break
        - note: {assign: [{seen: "${list.concat(seen, v)}"}]}
- done: {return: "${seen}"}
"""
    assert lab.run(source) == [1, 3]


def test_a_return_inside_a_loop_ends_the_routine(lab: Any) -> None:
    source = "- a:\n    for: {value: v, in: [1, 2], steps: [{r: {return: '${v}'}}]}\n"
    assert lab.run(source) == 1


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ("in: '${1}'", "'in' of a for loop must be a list; got: integer"),
        ("in: '${m}'", "'in' of a for loop must be a list; got: map"),
        ("range: '${[1]}'", "'range' must be a list of two numbers"),
        ("range: [a, 2]", "'range' must be of numbers; got: string"),
    ],
)
def test_wrong_values_of_loops_fail(lab: Any, loop: str, message: str) -> None:
    source = (
        f"- i: {{assign: [{{m: {{}}}}]}}\n- a:\n    for: {{value: v, {loop}, steps: [{{r: {{next: continue}}}}]}}\n"
    )
    value, _ = failure(lab, source)
    assert value == {"message": f"TypeError: {message}", "tags": ["TypeError"]}


def test_changes_to_outer_variables_survive_the_loop(lab: Any) -> None:
    source = """
- init: {assign: [{outer: 0}]}
- loop:
    for:
      value: v
      in: [1, 2]
      steps:
        - inner:
            for:
              value: w
              in: [10, 20]
              steps: [{add: {assign: [{local: "${v * w}"}, {outer: "${outer + local}"}]}}]
- again:
    for: {value: v, in: [100], steps: [{add: {assign: [{outer: "${outer + v}"}]}}]}
- done: {return: "${outer}"}
"""
    assert lab.run(source) == 190


# calls and subworkflows


def test_subworkflows_have_defaults_and_their_own_scope(lab: Any) -> None:
    source = """
main:
  steps:
    - init: {assign: [{x: outer}]}
    - one: {call: greet, args: {first: Ada}, result: a}
    - two: {call: greet, args: {first: Ada, last: null}, result: b}
    - three: {call: greet, args: {last: L, first: F}, result: c}
    - done: {return: ["${a}", "${b}", "${c}", "${x}"]}
greet:
  params: [first, last: Unknown, more: [1, {k: v}]]
  steps:
    - x: {assign: [{x: "${more[1].k}"}]}
    - r: {return: ["${first}", "${last}", "${x}"]}
"""
    assert lab.run(source) == [["Ada", "Unknown", "v"], ["Ada", None, "v"], ["F", "L", "v"], "outer"]


def test_main_gets_the_argument_or_null(lab: Any) -> None:
    source = "main:\n  params: [args]\n  steps:\n    - r: {return: '${args}'}\n"
    assert lab.run(source) is None
    assert lab.run(source, {"a": [1.5]}) == {"a": [1.5]}
    assert lab.run("- r: {return: 1}\n", {"ignored": True}) == 1


def test_recursion_is_bounded_and_can_be_caught(lab: Any) -> None:
    source = """
main:
  steps:
    - t:
        try: {call: down, args: {n: 0}}
        except: {as: e, steps: [{r: {return: "${e}"}}]}
down:
  params: [n]
  steps:
    - again: {call: down, args: {n: "${n + 1}"}}
"""
    error = lab.run(source)
    assert error["tags"] == ["RecursionError"]
    assert error["message"] == "RecursionError: call stack depth limit exceeded: 20"


def test_a_variable_without_a_value_on_this_path(lab: Any) -> None:
    source = "- a:\n    switch:\n      - condition: false\n        assign: [{x: 1}]\n- b: {return: '${x}'}\n"
    value, _ = failure(lab, source)
    assert value["tags"] == ["KeyError", "LookupError"]


def test_variables_may_have_the_names_of_modules(lab: Any) -> None:
    returned = "['${map.get}', '${map.get(map, \"get\")}', '${list.concat(list, 3)}']"
    source = f"- a:\n    assign:\n      - map: {{get: 1}}\n      - list: [2]\n- b:\n    return: {returned}\n"
    assert lab.run(source) == [1, 1, [2, 3]]


# raise, try, except, retry


def test_raise_keeps_values_as_they_are(lab: Any) -> None:
    source = """
main:
  params: [value]
  steps:
    - t:
        try: {raise: "${value}"}
        except: {as: e, steps: [{r: {return: "${e}"}}]}
"""
    for value in ("text", {"code": 7, "mine": [1]}, 5, None, ["x"]):
        assert lab.run(source, value) == value


def test_an_uncaught_string_shows_as_a_runtime_error(lab: Any) -> None:
    value, error = failure(lab, "- boom:\n    raise: how odd!\n")
    assert value == "how odd!"
    assert error["context"] == 'RuntimeError: "how odd!"\nin step "boom", routine "main", line: 1'
    assert error["stackTrace"]["elements"] == [
        {"step": "boom", "routine": "main", "position": {"line": "1", "column": "3", "length": "4"}}
    ]


def test_the_nearest_handler_takes_an_error_and_may_raise_it_again(lab: Any) -> None:
    source = """
main:
  steps:
    - init: {assign: [{trail: []}]}
    - outer:
        try:
          steps:
            - inner:
                try:
                  steps:
                    - deep: {call: fail}
                except:
                  as: e
                  steps:
                    - note: {assign: [{trail: "${list.concat(trail, e.code)}"}]}
                    - again: {raise: "${map.merge(e, extra())}"}
            - never: {raise: "not reached"}
        except:
          as: e
          steps:
            - note: {assign: [{trail: "${list.concat(trail, e)}"}]}
    - swallow:
        try: {raise: gone}
        except: {}
    - done: {return: "${trail}"}
fail:
  steps:
    - loop:
        for: {value: v, in: [1], steps: [{r: {raise: {code: 7}}}]}
extra:
  steps:
    - r: {return: {more: true}}
"""
    assert lab.run(source) == [7, {"code": 7, "more": True}]


def test_an_error_inside_except_leaves_the_try(lab: Any) -> None:
    source = """
- t:
    try: {raise: first}
    except: {as: e, steps: [{again: {raise: "${e + \\" second\\"}"}}]}
"""
    assert failure(lab, source)[0] == "first second"


def test_variables_of_a_try_body_stay_after_it(lab: Any) -> None:
    source = """
- t:
    try:
      steps: [{a: {assign: [{made: 1}]}}]
    except: {as: e, steps: [{b: {raise: "${e}"}}]}
- done: {return: "${made}"}
"""
    assert lab.run(source) == 1


RETRY = """
main:
  params: [policy]
  steps:
    - init: {assign: [{tries: 0}]}
    - t:
        try:
          steps:
            - count: {assign: [{tries: "${tries + 1}"}]}
            - fail: {raise: {code: "${500 + tries}", tags: [HttpError]}}
        retry: %s
        except:
          as: e
          steps:
            - done: {return: ["${tries}", "${e.code}"]}
only_first:
  params: [e]
  steps:
    - r: {return: "${e.code == 501}"}
"""


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            "{predicate: '${retry.always}', max_retries: 2, backoff: {initial_delay: 1, max_delay: 9, multiplier: 2}}",
            [3, 503],
        ),
        ("{predicate: '${retry.never}', max_retries: 2, backoff: {initial_delay: 1}}", [1, 501]),
        ("{predicate: '${only_first}', max_retries: 5}", [2, 502]),
        ("{predicate: '${retry.always}', max_retries: '${policy.n}'}", [2, 502]),
        ("{predicate: '${http.default_retry_predicate}', max_retries: 5}", [1, 501]),
        ("{predicate: '${retry.always}', max_retries: 1, backoff: '${retry.default_backoff}'}", [2, 502]),
        ("{max_retries: 0}", [1, 501]),
        ("'${http.default_retry}'", [1, 501]),
    ],
)
def test_retry(lab: Any, policy: str, expected: list[int]) -> None:
    assert lab.run(RETRY % policy, {"n": 1}) == expected


PREDICATE = """
main:
  steps:
    - outer:
        try:
          steps:
            - inner:
                try: {{raise: original}}
                retry: {{predicate: "${{p}}", max_retries: 2, backoff: {{initial_delay: 1, multiplier: 1}}}}
                except: {{as: e, steps: [{{back: {{return: "${{\\"inner \\" + e}}"}}}}]}}
        except: {{as: e, steps: [{{back: {{return: "${{\\"outer \\" + e}}"}}}}]}}
p:
  params: [e]
  steps: [{{decide: {{{step}}}}}]
"""


@pytest.mark.parametrize("step", ['return: "true"', "return: 1", "return: null", "return: {}", "assign: [{x: true}]"])
def test_only_true_from_a_predicate_retries(step: str) -> None:
    done = simulate(PREDICATE.format(step=step))
    assert done.result == "inner original"
    assert duration(done.record) == 0


def test_an_error_inside_a_predicate_leaves_the_try(lab: Any) -> None:
    """It replaces the error that the predicate was asked about; the `except` of the same step does not catch it."""
    assert lab.run(PREDICATE.format(step="raise: predicate")) == "outer predicate"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("- a: {return: 1, next: b}\n- b: {return: 2}\n", 1),
        ("- a: {switch: [{condition: true, return: 1, next: b}]}\n- b: {return: 2}\n", 1),
        ("- a: {switch: [{condition: true, steps: [{x: {return: 1}}], next: b}]}\n- b: {return: 2}\n", 1),
        ("- a: {switch: [{condition: true, next: b}], next: c}\n- b: {return: 2}\n- c: {return: 3}\n", 2),
    ],
)
def test_a_return_wins_over_next(lab: Any, source: str, expected: int) -> None:
    assert lab.run(source) == expected


def test_names_of_steps_may_hold_any_character(lab: Any) -> None:
    source = "- a-b: {next: c.d/ü 1}\n- x: {return: 1}\n- c.d/ü 1: {return: 2}\n"
    machine, value = lab.machine(source)
    assert value == 2
    assert machine.current_steps() == [{"routine": "main", "step": "c.d/ü 1"}]


def test_retry_reruns_the_whole_try_and_waits_by_the_backoff() -> None:
    source = (
        RETRY
        % "{predicate: '${retry.always}', max_retries: 4, backoff: {initial_delay: 2, max_delay: 5, multiplier: 1.5}}"
    )
    simulation = simulate(source)
    calls = [entry.started for entry in simulation.entries if entry.mark.type == "STEP_RAISE"]
    assert [round(b - a, 3) for a, b in pairwise(calls)] == [2.0, 3.0, 4.5, 5.0]


def test_default_retry_waits_1_second_times_1_25() -> None:
    source = "- t:\n    try: {call: http.get, args: {url: 'http://x'}}\n    retry: ${http.default_retry}\n"
    simulation = simulate(source, mocks=ScriptedMocks([{"call": "http.get", "code": 503}]))
    calls = [entry.started for entry in simulation.entries if entry.mark.type == "STEP_CALL"]
    assert len(calls) == 6
    assert [round(b - a, 4) for a, b in pairwise(calls)] == [1.0, 1.25, 1.5625, 1.9531, 2.4414]
    assert simulation.error["code"] == 503


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("'${policy}'", "a retry policy must be a map"),
        ("{predicate: '${policy}', max_retries: 1}", "a retry predicate must be a function"),
        ("{predicate: '${retry.always}', max_retries: many}", "'max_retries' must be a number"),
        ("{predicate: '${retry.always}', max_retries: 1, backoff: {multiplier: -1}}", "'multiplier' must be a number"),
    ],
)
def test_wrong_retry_policies_fail(lab: Any, policy: str, message: str) -> None:
    value, _ = failure(lab, RETRY % policy, 5)
    assert value["tags"] == ["TypeError"]
    assert message in value["message"]


# parallel


def test_branches_share_only_shared_variables(lab: Any) -> None:
    source = """
- init: {assign: [{shared: {}, }, {read: 5}]}
- p:
    parallel:
      shared: [shared]
      branches:
        - one:
            steps:
              - a: {assign: [{mine: "${read + 1}"}]}
              - b: {call: sys.sleep, args: {seconds: 1}}
              - c: {assign: [{shared.one: "${mine}"}]}
        - two:
            steps:
              - a: {assign: [{mine: other}, {shared.two: "${mine}"}]}
        - three:
            assign:
              - shared.three: 3
- done: {return: "${shared}"}
"""
    assert lab.run(source) == {"one": 6, "two": "other", "three": 3}


def test_parallel_iterations(lab: Any) -> None:
    source = """
- init: {assign: [{sum: 0}, {seen: {}}]}
- p:
    parallel:
      shared: [sum, seen]
      concurrency_limit: "${1 + 1}"
      for:
        value: v
        index: i
        in: [5, 6, 7, 8]
        steps:
          - check:
              switch:
                - condition: ${v == 6}
                  next: continue
          - nap: {call: sys.sleep, args: {seconds: 1}}
          - add: {assign: [{sum: "${sum + v}"}, {'seen["i" + i]': "${v}"}]}
- r:
    parallel:
      shared: [sum]
      for: {value: v, range: [1, 3], steps: [{add: {assign: [{sum: "${sum + v}"}]}}]}
- none:
    parallel:
      for: {value: v, in: [], steps: [{no: {raise: "not reached"}}]}
- done: {return: ["${sum}", "${seen}"]}
"""
    assert lab.run(source) == [26, {"i0": 5, "i2": 7, "i3": 8}]


def test_all_branches_end_before_the_error(lab: Any) -> None:
    source = """
- init: {assign: [{done: []}]}
- t:
    try:
      parallel:
        shared: [done]
        for:
          value: n
          range: [0, 5]
          steps:
            - check:
                switch:
                  - condition: ${n % 2 != 0}
                    raise: "how odd!"
            - nap: {call: sys.sleep, args: {seconds: 1}}
            - note: {assign: [{done: "${list.concat(done, n)}"}]}
    except: {as: e, steps: [{r: {return: ["${done}", "${e}"]}}]}
"""
    done, error = lab.run(source)
    assert sorted(done) == [0, 2, 4]
    assert error["message"] == (
        "UnhandledBranchError: One or more branches or iterations encountered an unhandled runtime error"
    )
    assert error["tags"] == ["UnhandledBranchError", "RuntimeError"]
    assert error["truncated"] is False
    assert [branch["id"] for branch in error["branches"]] == ["2", "4", "6"]
    assert error["branches"][0]["error"] == {
        "context": 'RuntimeError: "how odd!"\nin step "check", routine "main", line: 13',
        "payload": '"how odd!"',
    }


def test_parallel_steps_nest_at_most_twice(lab: Any) -> None:
    def nested(depth: int) -> str:
        inner = "{assign: [{x: 1}]}"
        for level in range(depth):
            inner = f"{{parallel: {{for: {{value: v{level}, in: [1, 2], steps: [{{s{level}: {inner}}}]}}}}}}"
        return f"- p: {inner}\n- done: {{return: ok}}\n"

    assert lab.run(nested(2)) == "ok"
    value, _ = failure(lab, nested(3))
    assert "ParallelNestingError" in value["branches"][0]["error"]["payload"] or "ParallelNestingError" in str(value)


def test_at_most_twenty_branches_run_at_once(lab: Any) -> None:
    source = """
- p:
    parallel:
      for: {value: v, range: [1, 50], steps: [{nap: {call: sys.sleep, args: {seconds: 1}}}]}
"""
    simulation = simulate(source)
    starts = sorted(entry.started for entry in simulation.entries if entry.mark.type == "STEP_CALL")
    assert [sum(1 for s in starts if round(s - starts[0]) == second) for second in range(3)] == [20, 20, 10]


@pytest.mark.parametrize(("limit", "tag"), [("'${0}'", "ValueError"), ("two", "TypeError"), ("1.5", "TypeError")])
def test_a_concurrency_limit_is_a_positive_integer(lab: Any, limit: str, tag: str) -> None:
    loop = "{value: v, in: [1], steps: [{a: {assign: [{x: 1}]}}]}"
    source = f"- p:\n    parallel:\n      concurrency_limit: {limit}\n      for: {loop}\n"
    assert failure(lab, source)[0]["tags"][0] == tag


# limits


def test_limits_cannot_be_caught(lab: Any) -> None:
    source = """
- t:
    try:
      steps:
        - again: {assign: [{x: 1}], next: again}
    except: {as: e, steps: [{r: {return: caught}}]}
"""
    value, _ = failure(lab, source, limits=Limits(steps=500))
    assert value == {"message": "ResourceLimitError: steps limit exceeded: 500", "tags": ["ResourceLimitError"]}


@pytest.mark.parametrize(
    ("steps", "tag"),
    [
        ("- a: {assign: [{x: '0123456789abcdef'}]}\n- b: {assign: [{x: '${x + x}'}], next: b}\n", "ResourceLimitError"),
        ("- a: {assign: [{x: [1]}]}\n- b: {assign: [{x: '${[x, x]}'}], next: b}\n", "MemoryLimitExceededError"),
        ("- a: {assign: [{x: [1]}]}\n- b: {assign: [{x: '${[x]}'}], next: b}\n", "ResourceLimitError"),
        (  # eight thousand items: with the smallest items, 65 thousand copies of ever longer lists take ten seconds
            f"- a: {{assign: [{{x: []}}]}}\n- b: {{assign: [{{x: '${{list.concat(x, \"{'y' * 64}\")}}'}}], next: b}}\n",
            "MemoryLimitExceededError",
        ),
        (
            "- a: {assign: [{x: abcdefgh}]}\n- b: {assign: [{x: '${text.replace_all(x, \"\", x)}'}], next: b}\n",
            "ResourceLimitError",
        ),
    ],
)
def test_values_cannot_outgrow_memory(lab: Any, steps: str, tag: str) -> None:
    value, _ = failure(lab, steps)
    assert tag in value["tags"]


@pytest.mark.parametrize("value", ["a\ud800", {"k": ["\udfff"]}, {"\ud800": 1}])
def test_a_lone_surrogate_is_refused_as_a_result(value: Any) -> None:
    done = simulate("main:\n  params: [args]\n  steps: [{back: {return: '${args}'}}]\n", value)
    assert done.error["tags"] == ["ValueError"]
    assert "the workflow's result: lone surrogate U+D" in done.error["message"]
    assert done.record.error is not None
    assert 'in step "back"' in done.record.error["context"]


def test_a_lone_surrogate_is_refused_as_the_argument_of_a_subexecution() -> None:
    source = """
main:
  params: [args]
  steps:
    - t:
        try: {call: experimental.executions.run, args: {workflow_id: workflow, argument: "${args}"}}
        except: {as: e, steps: [{back: {return: "${e}"}}]}
"""
    error = simulate(source, "\ud800").result
    assert (error["code"], error["tags"]) == (400, ["HttpError"])
    assert "lone surrogate U+D800 at character 1" in error["body"]["error"]["message"]


CATCH_ALL = "    except: {as: e, steps: [{r: {return: caught}}]}\n"


@pytest.mark.parametrize(
    "step",
    [
        "- fill: {assign: [{a: '${x + 1}'}, {b: '${x + 2}'}, {c: '${x + 3}'}, {d: '${x + 4}'}, {e: '${x + 5}'}]}",
        "- fill: {assign: [{m: {}}, {m.a: '${[x]}'}, {m.b: '${[x]}'}, {n: '${m}'}, {o: '${m}'}]}",
        "- fill: {call: inner, args: {a: '${x}', b: '${x}', c: '${x}', d: '${x}'}, result: y}",
        "- fill: {assign: [{a: '${inner(x, x, x, x)}'}]}",
        "- fill: {call: list.concat, args: {objs: ['${x}', '${x}'], val: '${x}'}, result: y}\n"
        "            - more: {call: list.concat, args: {objs: ['${x}', '${x}'], val: '${x}'}, result: z}",
    ],
)
def test_the_limit_of_all_variables_holds_at_every_assignment(lab: Any, step: str) -> None:
    """No wait, and no slice of steps, ends between the assignment and the return."""
    inner = "inner:\n  params: [a, b, c, d]\n  steps: [{r: {return: 1}}]\n"
    made = "- double: {for: {value: i, range: [1, 13], steps: [{g: {assign: [{x: '${x + x}'}]}}]}}"  # 131,072 bytes
    start = "- start: {assign: [{x: 0123456789abcdef}]}"
    body = f"{start}\n            {made}\n            {step}\n            - done: {{return: ok}}"
    source = f"main:\n  steps:\n    - t:\n        try:\n          steps:\n            {body}\n    {CATCH_ALL}{inner}"
    value, error = failure(lab, source)
    assert value["tags"] == ["ResourceLimitError", "MemoryLimitExceededError"]
    assert 'in step "' in error["context"]


def test_a_variable_may_be_replaced_by_as_large_a_value(lab: Any) -> None:
    source = """
- start: {assign: [{x: 0123456789abcdef}]}
- double: {for: {value: i, range: [1, 14], steps: [{g: {assign: [{x: '${x + x}'}]}}]}}
- again: {for: {value: i, range: [1, 5], steps: [{g: {assign: [{x: '${text.to_upper(x)}'}]}}]}}
- done: {return: '${len(x)}'}
"""
    assert lab.run(source) == 262_144


@pytest.mark.parametrize(
    "value", ["['${x + \"1\"}']", "{a: {b: '${x + \"1\"}'}}", "{'${x + \"1\"}': 1}", "'${[[x + 1]]}'"]
)
def test_the_limit_of_a_string_holds_inside_lists_and_maps(lab: Any, value: str) -> None:
    source = f"""
- start: {{assign: [{{x: 0123456789abcdef}}]}}
- double: {{for: {{value: i, range: [1, 14], steps: [{{g: {{assign: [{{x: '${{x + x}}'}}]}}}}]}}}}
- hide: {{assign: [{{y: {value}}}, {{x: null}}]}}
- done: {{return: 1}}
"""
    failed, _ = failure(lab, source)
    assert failed["message"] == "ResourceLimitError: a string of 262145 bytes; the limit is 262144"


@pytest.mark.parametrize("body", ["x" * 262_145, {"a": ["x" * 262_145]}])
def test_the_limit_of_a_string_holds_for_a_body_that_is_a_result(lab: Any, body: Any) -> None:
    answer = {"body": body, "code": 200, "headers": {}}
    source = "- get: {call: http.get, args: {url: 'http://peer/'}%s}\n- done: {return: 1}\n"
    with pytest.raises(Failed, match="a string of 262145 bytes; the limit is 262144"):
        lab.run(source % ", result: r", answers=[answer])
    assert lab.run(source % "", answers=[answer]) == 1  # a response that no variable keeps may be longer


def test_bytes_and_huge_values_are_refused_as_results(lab: Any) -> None:
    assert failure(lab, "- a: {return: '${text.encode(\"x\")}'}\n")[0]["tags"] == ["ValueError"]
    source = """
- a: {assign: [{x: '0123456789'}]}
- l: {for: {value: i, range: [1, 14], steps: [{g: {assign: [{x: '${x + x}'}]}}]}}
- r: {return: ['${x}', '${x}', '${x}', '${x}']}
"""
    value, _ = failure(lab, source)
    assert "ResultSizeLimitExceededError" in value["tags"]


def test_the_limits_can_be_lifted(lab: Any) -> None:
    source = """
- i: {assign: [{x: 0}]}
- l: {for: {value: i, range: [1, 200000], steps: [{g: {assign: [{x: '${x + 1}'}]}}]}}
- r: {return: '${x}'}
"""
    assert lab.run(source, limits=Limits.lifted()) == 200000


def test_steps_are_counted_as_the_service_bills_them(lab: Any) -> None:
    source = """
main:
  steps:
    - three: {assign: [{a: 1}, {b: 2}, {c: 3}]}
    - sub: {call: inner}
    - out: {call: http.get, args: {url: "https://example.com"}}
    - google: {call: http.get, args: {url: "https://run.googleapis.com/v2"}}
inner:
  steps:
    - one: {assign: [{x: 1}]}
"""
    machine, _ = lab.machine(source)
    assert (machine.steps - machine.external_steps, machine.external_steps) == (6, 1)
