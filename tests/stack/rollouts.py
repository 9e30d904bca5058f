"""Rollouts of a named endpoint: many of them under load, and one with a death at each commit.

    python -m tests.stack.rollouts load --rollouts 50 --rollbacks 20
    python -m tests.stack.rollouts crash --every 1
    python -m tests.stack.rollouts load --on gke

`load` prints how many requests failed. `crash` kills the stack, or its functions, at each commit of a rollout while a
client asks; it prints a line for each broken promise, and a table. This command repeats a try:

    python -m tests.stack.rollouts crash --life deploy --kill stack --from 37 --to 37
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from openai import APIStatusError, OpenAIError

from dropforge.base import names
from dropforge.endpoints.record import EndpointRecord, Rollout, RolloutState
from dropforge.run.record import RunState
from dropforge_local.stack import control as local
from dropforge_local.stack.config import StackError

from .conftest import NOOP_CONFIG, User, user_of
from .crash import ENOUGH, UNREACHABLE, Harness, Result, zygote
from .named import KINDS, OPERATIONS, Load, Named, repeated

LIVES = {
    "deploy": RolloutState.PROMOTED,
    "canary": RolloutState.PROMOTED,
    "rollback": RolloutState.PROMOTED,
    "refused": RolloutState.ROLLED_BACK,
}
KILLS = ("stack", "functions")
PAUSE_SECONDS = 0.02  # between two requests: a rollout may wait for a sweep for a minute
LEAST = 5  # answers of the model that serves after a rollout


class Death(NamedTuple):
    """A rollout, and the part that is killed right after one of its commits; commit 0 kills nothing."""

    life: str
    kill: str = "stack"
    commit: int = 0


class Asker:
    """A client that asks all the time, also while the stack is dead."""

    def __init__(self, named: Named) -> None:
        self._named = named
        self._client = named.client()
        self.answers: list[str] = []  # the revision of each answer
        self.refusals: list[str] = []  # answers that are no 200
        self.cuts: list[str] = []  # connections that were refused, or closed before the end of an answer

    @contextmanager
    def running(self) -> Iterator[Asker]:
        with self._client, repeated(self._ask, PAUSE_SECONDS):
            yield self

    def _ask(self) -> None:
        messages: Any = [{"role": "user", "content": "Hello"}]
        try:
            answer = self._client.chat.completions.create(model=self._named.name, messages=messages)
            self.answers.append(str(answer.system_fingerprint))
        except APIStatusError as error:
            self.refusals.append(repr(error))
        except OpenAIError as error:
            self.cuts.append(repr(error))


class RolloutHarness(Harness):
    """A stack with a named endpoint; it is killed during rollouts, and started again."""

    def __init__(self, state: Path, kind: str = "cloud_run") -> None:
        super().__init__(state)
        self.named = Named(self.user, "survivor", kind)
        self.named.serves("sealed")
        self.runs = [revision.run for revision in self.named.serves("sealed").revisions]

    def roll(self, death: Death) -> Result:
        """Carry out a rollout with a death. The promises do not depend on the death."""
        begin, before = time.monotonic(), self._endpoint()
        self._until(lambda: self._post("_local/crash", {"commit": 0}))
        self._settle()
        with Asker(self.named).running() as asker:
            try:
                rollout = self._begin(death, before)
                done = self._until(lambda: self._ended(rollout))
                serving = self._endpoint().revision(self._endpoint().stable).revision
                self._until(lambda: asker.answers[-LEAST:] == [serving] * LEAST)
                self._until(lambda: all(each["state"] != "ACTIVE" for each in self._executions_of(rollout)))
                self._until(lambda: self._is_told(done))
            except TimeoutError:
                return Result(True, time.monotonic() - begin, [f"{death} did not end: {self._endpoint()!r}"])
            except StackError as error:
                return Result(True, time.monotonic() - begin, [f"{death}: the stack does not start again: {error}"])
        switch = self._get("_local/crash")
        self._post("_local/crash", {"commit": 0})
        is_killed = bool(death.commit) and not switch["armed"]["commit"]
        problems = [f"{death}: {problem}" for problem in self._rollout_problems(death, before, done, asker, is_killed)]
        return Result(is_killed, time.monotonic() - begin, problems, switch["commits"])

    def _begin(self, death: Death, before: EndpointRecord) -> str:
        """Arm the death and request the rollout; return its id. A request that the death interrupts is repeated."""
        armed = {"commit": death.commit, "moment": "after", "kill": death.kill}
        if death.life == "refused":  # only the run itself puts a model behind a name that its seal refuses
            serve = {"type": self.named.kind, "endpoint": self.named.name}
            run = self._drop(self.user.spec("sealed-otherwise", serve=serve))
            self._until(lambda: (found := self._record(run)) and found.state is RunState.DEPLOYING)
            self._arm(armed)
            return run
        serving = before.revision(before.stable).run
        model = next(run for run in self.runs if run != serving)
        wanted = {"canary": {"percent": 50, "for": "1s", "max_latency_ratio": 100}} if death.life == "canary" else {}
        request = {"serve": {"run": model, "endpoint": self.named.name, **wanted}}
        change: dict[str, Any] = {"rollback": self.named.name} if death.life == "rollback" else request
        self._arm(armed)
        key, topic = uuid.uuid4().hex, self.user.settings.topic(OPERATIONS)
        message = {"data": b64encode(json.dumps(change).encode()).decode(), "attributes": {"idempotency_key": key}}
        self._until(lambda: self._post(f"v1/{topic}:publish", {"messages": [message]}))
        return names.rollout_id(OPERATIONS, key)

    def _arm(self, armed: dict[str, Any]) -> None:
        """Arm the death. The stack may die before it answers: the run commits all the time."""
        with suppress(*UNREACHABLE):
            self._post("_local/crash", armed)

    def _rollout_problems(
        self, death: Death, before: EndpointRecord, done: Rollout, asker: Asker, is_killed: bool
    ) -> Iterator[str]:
        after = self._endpoint()
        if done.state is not LIVES[death.life]:
            yield f"is {done.state}, {done.error!r}; expected {LIVES[death.life]}"
        if death.life == "refused" and after.stable != before.stable:
            yield f"revision {after.stable} serves; expected {before.stable} as before"
        numbers = {before.stable, after.stable}
        if strange := set(asker.answers) - {after.revision(number).revision for number in numbers}:
            yield f"requests were answered by {strange}"
        if asker.refusals:
            yield f"{len(asker.refusals)} requests were refused, first with {asker.refusals[0]}"
        if asker.cuts and not (is_killed and death.kill == "stack"):
            yield f"{len(asker.cuts)} requests were cut, first with {asker.cuts[0]}"
        results = [json.loads(each.get("result", "{}")) for each in self._executions_of(done.id)]
        if sum(result.get("status") != "SUPERSEDED" for result in results) != 1:
            yield f"has the executions {results}"
        paid = {revision.number for revision in after.revisions if revision.paid_since}
        if paid != self.named.paid:
            yield f"pays for the revisions {paid}; expected {self.named.paid}"
        if sum(rollout.id == done.id for rollout in after.rollouts) != 1:
            yield "is in the record more than once"

    def _endpoint(self) -> EndpointRecord:
        name, bucket = quote(names.endpoint_object(self.named.name), safe=""), self.user.settings.runs_bucket
        content = self._until(lambda: self._get(f"storage/v1/b/{bucket}/o/{name}?alt=media"))
        return EndpointRecord.model_validate_json(json.dumps(content))

    def _ended(self, rollout: str) -> Rollout | None:
        found = self._endpoint().find(rollout)
        return found if found and found.state.is_terminal else None

    def _is_told(self, done: Rollout) -> bool:
        """Whether the run has the notice about the end of the rollout."""
        record = self._record(self._endpoint().revision(done.revision).run)
        return record is not None and f"rollout-{done.id}-{done.state.lower()}" in record.notices

    def _executions_of(self, rollout: str) -> list[dict[str, Any]]:
        listed = self._get(f"v1/{self.user.settings.rollout_workflow_name}/executions?view=FULL&pageSize=50")
        return [each for each in listed["executions"] if each["labels"].get(names.ROLLOUT_LABEL) == rollout]


class Figures(NamedTuple):
    """What clients saw of rollouts: counts of requests and streams, and the seconds from a request to its end."""

    requests: int
    streams: int
    failed: list[str]
    rollouts: list[float]
    rollbacks: list[float]

    def __str__(self) -> str:
        lines = [
            f"{len(each)} {word}, median {statistics.median(each):.1f} s, longest {max(each):.1f} s"
            for each, word in ((self.rollouts, "rollouts"), (self.rollbacks, "rollbacks"))
            if each
        ]
        return "\n".join([*lines, f"{self.requests} requests ({self.streams} streams), {len(self.failed)} failed"])


def under_load(user: User, rollouts: int, rollbacks: int, kind: str = "cloud_run") -> Figures:
    """Put two models behind a name in turn, and go back as often, while clients ask without a pause."""
    named = Named(user, kind=kind)
    models = [revision.run for _ in range(2) for revision in named.serves().revisions[-1:]]
    changes = [{"serve": {"run": models[each % 2], "endpoint": named.name}} for each in range(rollouts)]
    deployed: list[float] = []
    returned: list[float] = []
    with Load(named, pause_seconds=0).running() as load:
        for change in changes:
            deployed.append(_change(named, load, change))
        for _ in range(rollbacks):
            returned.append(_change(named, load, {"rollback": named.name}))
    named.retire()
    return Figures(len(load.answers) + len(load.problems), load.streams, load.problems, deployed, returned)


def _change(named: Named, load: Load, change: dict[str, Any]) -> float:
    """Make a change and wait until clients see it; return its seconds."""
    begin = time.monotonic()
    rollout = named.ended(named.ask(**change))
    assert rollout.state is RolloutState.PROMOTED, rollout
    seconds = time.monotonic() - begin
    named.user.until(partial(load.has_seen, named.record.revision(rollout.revision).revision))
    return seconds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stack.rollouts", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    load = commands.add_parser("load", help="many rollouts under load")
    load.add_argument("--rollouts", type=int, default=50)
    load.add_argument("--rollbacks", type=int, default=20)
    crash = commands.add_parser("crash", help="a death at each commit of a rollout")
    crash.add_argument("--life", choices=[*LIVES], action="append", help="default: all lives")
    crash.add_argument("--kill", choices=KILLS, action="append", help="default: both")
    crash.add_argument("--every", type=int, default=1, metavar="N", help="every Nth commit")
    crash.add_argument("--from", type=int, dest="first", default=1, metavar="COMMIT")
    crash.add_argument("--to", type=int, dest="last", default=1000, metavar="COMMIT")
    for command in (load, crash):
        command.add_argument("--on", choices=KINDS, default="cloud_run", help="the platform; default: cloud_run")
    options = parser.parse_args(arguments)
    local._spawn = zygote().spawn
    with tempfile.TemporaryDirectory(prefix="dropforge-rollouts-") as home:
        try:
            return _load(Path(home), options) if options.command == "load" else _crash(Path(home), options)
        finally:
            local.down(Path(home))


def _load(home: Path, options: argparse.Namespace) -> int:
    NOOP_CONFIG.save(home)
    local.up(home)
    figures = under_load(user_of(home), options.rollouts, options.rollbacks, options.on)
    print(figures, *figures.failed[:10], sep="\n")
    return int(bool(figures.failed))


def _crash(home: Path, options: argparse.Namespace) -> int:
    harness, rows, problems = RolloutHarness(home, options.on), [], 0
    for life in options.life or LIVES:
        for kill in options.kill or KILLS:
            results = []
            for commit in range(options.first, options.last + 1, options.every):
                results.append(harness.roll(Death(life, kill, commit)))
                print(*results[-1].problems, sep="\n", end="\n" * bool(results[-1].problems), flush=True)
                if [result.killed for result in results[-ENOUGH:]] == [False] * ENOUGH:
                    break
            problems += sum(bool(result.problems) for result in results)
            deaths, seconds = sum(each.killed for each in results), sum(each.seconds for each in results)
            wrong = sum(bool(each.problems) for each in results)
            rows.append(
                f"{life}, {kill}: {len(results)} tries, {deaths} deaths, {wrong} with problems, {seconds:.0f} s"
            )
            print(rows[-1], flush=True)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
