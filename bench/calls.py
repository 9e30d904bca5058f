"""Counts the requests, the calls of functions and the billed workflow steps of a no-op run.

The stack records each request of functions and containers (dropforge_local.base.recording), and its workflow engine
counts the steps that Google would bill. Nothing here depends on the speed of the machine, except how often a function
looks at a run that has not ended: `python -m bench.calls --runs N` prints the mean of N runs, one after another. With
`--behave slow`, the container works for three seconds, as the shortest training that reports its start by itself.

All functions share a process and what it remembers here. In the cloud, each function has its own process: it reads the
record that another function has written, which has the spec, and once on each day the key of the day.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from dropforge.money.control_plane import Usage
from dropforge_local.base.recording import FILE, INVOCATION, TRAINER
from dropforge_local.stack.deployment import PROJECT

from .stack import User, running_stack

RUNS = 20
STATE = "state.db"
WORKFLOW_CALLS = ("provision", "inspect", "deploy", "teardown")
# The parts of a request that differ between runs, and what stands for them.
_VARIABLE = (
    (r"callbacks/.*", "callbacks/CALLBACK"),
    (r"executions/[0-9a-f-]{36}", "executions/EXECUTION"),
    (r"operations/.*", "operations/OPERATION"),
    (r"specs/specs/.*", "specs/SPEC"),
    (r"(events/)\d+-\d+-", r"\1"),
    (r"[a-z][a-z0-9-]{0,19}-[0-9a-f]{12}", "RUN"),
)


@dataclass(frozen=True)
class Counts:
    """The calls of some runs: requests by (caller, kind), calls of functions by name, billed steps of the workflow.

    `waits` are the steps that are billed as external: waits for a callback. Calls of functions are internal steps.
    """

    requests: Counter[tuple[str, str]]
    invocations: Counter[str]
    steps: int
    waits: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.requests + other.requests,
            self.invocations + other.invocations,
            self.steps + other.steps,
            self.waits + other.waits,
        )

    def since(self, before: Counts) -> Counts:
        """The calls that were counted since `before`."""
        return Counts(
            self.requests - before.requests,
            self.invocations - before.invocations,
            self.steps - before.steps,
            self.waits - before.waits,
        )


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calls")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N")
    parser.add_argument("--behave", default="succeed", help="what the containers do (default: %(default)s)")
    options = parser.parse_args(arguments)
    with running_stack(record=True) as (state, info):
        user = User(info)
        show(reduce(add, count_runs(user, state, options.runs, options.behave)), options.runs)


def count_runs(user: User, state: Path, runs: int, behave: str = "succeed") -> list[Counts]:
    """The calls of each of this many no-op runs, after a first run that makes clients and connections."""
    user.wait([user.drop(f"warm-up-{behave}")])
    wait_until_quiet(user)
    dropped, counted, before = list[str](), list[Counts](), counts(state)
    for number in range(runs):
        dropped.append(user.drop(f"{behave}-{number}", behave))
        user.wait(dropped[-1:])
        wait_until_quiet(user)
        after = counts(state)
        counted.append(after.since(before))
        before = after
    user.check_ended(dropped, "SUCCEEDED")
    return counted


def wait_until_quiet(user: User) -> None:
    """Wait until every execution has ended: the last steps of a run follow its last event."""
    while user.executions("ACTIVE"):
        time.sleep(0.05)


def counts(state: Path) -> Counts:
    """Everything that a stack has recorded so far."""
    calls = [json.loads(line) for line in (state / FILE).read_text().splitlines()]
    invocations = Counter(call["caller"] for call in calls if call["call"] == INVOCATION)
    requests = Counter((call["caller"], kind_of(call)) for call in calls if call["call"] != INVOCATION)
    with closing(sqlite3.connect(f"file:{state / STATE}?mode=ro", uri=True)) as database:
        query = "SELECT coalesce(sum(steps), 0), coalesce(sum(external_steps), 0) FROM wf_execution"
        steps, external = database.execute(query).fetchone()
    # The engine counts a call of a function as external, because the functions of a local stack have no Google address.
    return Counts(requests, invocations, steps, external - sum(invocations[name] for name in WORKFLOW_CALLS))


def kind_of(call: dict[str, Any]) -> str:
    """A recorded call without what differs between runs, such as `GET runs/RUN/record.json`."""
    verb, _, target = call["call"].partition(" ")
    if not target:  # gRPC
        return f"{verb.rsplit('/', 1)[-1]} {call.get('on', '').rsplit('/', 1)[-1]}"
    url = urlsplit(target)
    path, query = unquote(url.path), parse_qs(url.query)
    if "/storage/v1/b/" in path:
        bucket, _, name = path.partition("/b/")[2].partition("/o")
        name = name.removeprefix("/") or call.get("object") or "".join(query.get("name", []))
        verb, name = (verb, name) if name or verb == "POST" else ("LIST", "".join(query.get("prefix", [])) + "*")
        path = f"{bucket.removeprefix(PROJECT).removeprefix('-dropforge-')}/{name}"
    path = path.partition("/locations/")[2] or path
    for pattern, replacement in _VARIABLE:
        path = re.sub(pattern, replacement, path)
    return f"{verb} {path}"


def usage_of(counted: Counts, runs: int) -> Usage:
    """The operations that Google would bill for one of these runs. The upload of the spec is a write and a message."""
    kinds = Counter[str]()
    for (_, kind), count in counted.requests.items():
        kinds[_billed_as(kind)] += count
    return Usage(
        internal_steps=(counted.steps - counted.waits) / runs,
        external_steps=counted.waits / runs,
        calls=counted.invocations.total() / runs,
        writes=kinds["write"] / runs + 1,
        reads=kinds["read"] / runs,
        messages=kinds["message"] / runs + 1,
    )


def _billed_as(kind: str) -> str:
    """Return "write" or "read" (operations of Cloud Storage of class A and B), "message", or "" for what is free."""
    verb, _, target = kind.partition(" ")
    if verb == "Publish" or target.endswith(":publish"):
        return "message"
    if not target.startswith(("runs/", "specs/")):
        return ""  # the API requests of Workflows, Cloud Run and so on cost nothing
    return {"POST": "write", "LIST": "write", "PATCH": "write", "GET": "read"}.get(verb, "")


def show(counted: Counts, runs: int) -> None:
    callers = Counter[str]()
    for (caller, _), count in counted.requests.items():
        callers[caller] += count
    print(f"{'requests':<70} {'a run':>6}")
    for caller in _order(callers):
        calls = counted.invocations[caller]
        print(f"{caller} ({calls / runs:.1f} calls)" if calls else caller)
        kinds = [(kind, count) for (of, kind), count in counted.requests.items() if of == caller]
        for kind, count in sorted(kinds, key=lambda pair: (-pair[1], pair[0])):
            print(f"    {kind:<66} {count / runs:>6.2f}")
        print(f"    {'':<66} {callers[caller] / runs:>6.1f}")
    print(f"{'all requests':<70} {sum(callers.values()) / runs:>6.1f}")
    print(f"{'calls of functions':<70} {sum(counted.invocations.values()) / runs:>6.1f}")
    print(f"{'billed workflow steps':<70} {counted.steps / runs:>6.1f}")
    print(f"{'waits among these steps':<70} {counted.waits / runs:>6.1f}")
    print(f"{'US dollars, at list prices':<70} {usage_of(counted, runs).usd:>6.6f}")


def _order(callers: Iterable[str]) -> list[str]:
    return sorted(callers, key=lambda caller: (caller == TRAINER, caller))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
