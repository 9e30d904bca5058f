"""Kill a part of a whole stack at a commit, restart it, and check that nothing is lost, left over or doubled.

    python -m tests.stack.crash --target gke --all --lanes 2

tries every commit of every life (LIVES) on a target. It prints a line for each failed try, and a table at the end.
Containers train nothing. Without --all it tries every seventh commit; --seed draws the first commit. This command
repeats a failed try:

    python -m tests.stack.crash --target gke --life success --kill stack --moment after --from 37 --to 37

Each try is a line in build/crash.jsonl. --continue skips the tries that succeeded, and --table sums up the file.
zygote.py forks the stacks from a process that has imported their modules; --slow starts them as users do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from dropforge.base import names
from dropforge.run.events import Started, read_job_events
from dropforge.run.record import Record, RunState
from dropforge_local.stack import control as local
from dropforge_local.stack.config import ROOT, StackError

from .conftest import NOOP_CONFIG, user_of
from .targets import PARTS, SERVES
from .zygote import Zygote

T = TypeVar("T")
STRIDE = 7
# A plan ends after so many lives in a row without a death. The number of commits varies a little between lives.
ENOUGH = 3
RUNS = 30  # runs in one stack; the Kubernetes events of earlier runs make each later run slower
TIMEOUT = 200.0
POLL_SECONDS = 0.1
RESULTS = Path("build/crash.jsonl")
UNREACHABLE = (OSError, http.client.HTTPException)
NOTICES = {RunState.ACCEPTED, RunState.TRAINING, RunState.SUCCEEDED, RunState.FAILED}


class Life(NamedTuple):
    """The behaviour of a run's container, and the end of the run that every death must lead to."""

    behave: str
    state: RunState
    attempts: int = 1
    serves: bool = False


LIVES = {
    "success": Life("succeed", RunState.SUCCEEDED),
    "serving": Life("succeed", RunState.SUCCEEDED, serves=True),
    "failure": Life("fail-data", RunState.FAILED),
    "preempted": Life("preempted-once", RunState.SUCCEEDED, attempts=2),
}


@dataclass(frozen=True)
class Case:
    """A life on a target, the part that is killed, and the moment of the kill relative to the commit."""

    target: str
    life: str
    kill: str = "stack"
    moment: str = "after"

    @property
    def spec(self) -> dict[str, Any]:
        serves = LIVES[self.life].serves
        kind = self.target if self.target in SERVES else "cloud_run"
        return {
            "target": {"type": self.target, **PARTS[self.target]},
            "serve": {"type": kind, **SERVES[kind]} if serves else None,
        }


@dataclass
class Result:
    """The result of a try: whether a part was killed, the duration, the problems, and the number of commits."""

    killed: bool
    seconds: float
    problems: list[str]
    commits: int = 0


class Harness:
    """A stack that is killed and restarted repeatedly; earlier runs stay in it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        NOOP_CONFIG.save(state)
        local.up(state)
        self.user = user_of(state)
        self._subscription = f"projects/{self.user.settings.project}/subscriptions/crash"
        topic = self.user.settings.topic(self.user.settings.run_events_topic)
        self._post(f"v1/{self._subscription}", {"topic": topic}, method="PUT")

    def close(self) -> None:
        local.down(self.state)

    def attempt(self, case: Case, commit: int) -> Result:
        """Run a life and kill `case.kill` at the commit with this number; 0 kills nothing."""
        begin, life = time.monotonic(), LIVES[case.life]
        self._until(lambda: self._post("_local/crash", {"commit": 0}))
        self._settle()
        self._post("_local/crash", {"commit": commit, "moment": case.moment, "kill": case.kill})
        run = self._drop(self.user.spec(life.behave, **case.spec))
        try:
            record = self._until(lambda: self._terminal_record(run))
            if record.endpoint:
                self._until(lambda: self._cancel(run))
                record = self._until(lambda: self._record_with_ended_endpoint(run))
            self._until(lambda: all(e["state"] != "ACTIVE" for e in self._executions(run)))
        except TimeoutError:
            return Result(True, time.monotonic() - begin, [f"{run} did not end: {self._record(run)!r}"])
        except StackError as error:
            return Result(True, time.monotonic() - begin, [f"{run}: the stack does not start again: {error}"])
        switch = self._get("_local/crash")
        self._post("_local/crash", {"commit": 0})
        killed = bool(commit) and not switch["armed"]["commit"]
        problems = [f"{run} {problem}" for problem in self._problems(record, case, killed)]
        return Result(killed, time.monotonic() - begin, problems, switch["commits"])

    def _problems(self, record: Record, case: Case, killed: bool) -> Iterator[str]:
        """Yield each broken promise of a run; the promises do not depend on the kill."""
        run, life = record.run, LIVES[case.life]
        extra_attempts = int(killed and case.kill == "containers")  # a killed container costs an attempt
        if record.state is not life.state:
            yield f"is {record.state}, {record.error!r}; expected {life.state}"
        if not life.attempts <= len(record.attempts) <= life.attempts + extra_attempts:
            yield f"has {len(record.attempts)} attempts; expected {life.attempts}"
        if sum(transition.state.is_terminal for transition in record.history) != 1:
            yield f"entered more than one terminal state: {record.history}"
        if any(attempt.ended is None for attempt in record.attempts):
            yield "has an attempt without an end"
        if left := self.user.resources(run):
            yield f"left {left}"
        yield from self._ledger_problems(run)
        yield from self._execution_problems(record)
        yield from self._notice_problems(record)
        is_resubmitted = killed and case.kill == "containers" and case.target == "ray"  # to the new head
        yield from self._training_problems(run, 1 + is_resubmitted)

    def _ledger_problems(self, run: str) -> Iterator[str]:
        ledger = self.user.store.ledger(run)
        if remaining := [entry.name for entry in ledger.remaining()]:
            yield f"has a ledger with remaining entries: {remaining}"
        counts = Counter((entry.kind, entry.attempt, names.is_endpoint(entry.name, run)) for entry in ledger.entries)
        if doubled := [key for key, count in counts.items() if count > 1]:
            yield f"has more than one of {doubled} in an attempt"

    def _execution_problems(self, record: Record) -> Iterator[str]:
        results = {e["name"].rsplit("/", 1)[1]: json.loads(e.get("result", "{}")) for e in self._executions(record.run)}
        effective = [name for name, result in results.items() if result.get("status") != "SUPERSEDED"]
        if effective != [record.execution]:
            yield f"has the effective executions {effective}; expected only {record.execution}"

    def _notice_problems(self, record: Record) -> Iterator[str]:
        """Check that each state in NOTICES was announced, and that repeated announcements have the same id."""
        expected = {f"{record.run}/{t.attempt}/{t.state.lower()}" for t in record.history if t.state in NOTICES}
        # A sweep may have sent notices, too; they are not changes of state.
        announced = {key for key in self._notices(record.run) if "/notice/" not in key}
        if announced != expected:
            yield f"announced {sorted(announced)} in Slack; expected {sorted(expected)}"
        events = self._events(record.run)
        if (last := f"{record.run}/{record.history[-1].attempt}/{record.state.lower()}") not in events:
            yield f"did not publish the run event {last}; it published {sorted(events)}"
        changes = {key for key in events if "/notice/" not in key}
        if unknown := changes - {f"{record.run}/{t.attempt}/{t.state.lower()}" for t in record.history}:
            yield f"published {sorted(unknown)}, but was never in these states"

    def _training_problems(self, run: str, times: int) -> Iterator[str]:
        """Check that each attempt reported its start at most `times` times."""
        store = self.user.store
        stored = [store.read(name).data for name in store.names(names.events_prefix(run))]
        told = [event for data in stored for event in read_job_events(data, run)]
        attempts = Counter(event.attempt for event in told if isinstance(event, Started))
        if doubled := [attempt for attempt, count in attempts.items() if count > times]:
            yield f"trained more than {times} times in attempts {doubled}"

    def _until(self, poll: Callable[[], T | None], timeout: float = TIMEOUT) -> T:
        """Call `poll` until its result is true and return it; restart the stack whenever it is dead."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with suppress(*UNREACHABLE):
                if result := poll():
                    return result
            if local.running(self.state) is None:
                local.up(self.state)
            time.sleep(POLL_SECONDS)
        raise TimeoutError

    def _settle(self) -> None:
        """Wait until the previous run writes nothing more, because its commits would count for the next run."""
        before = -1
        while before != (commits := self._get("_local/crash")["commits"]):
            before = commits
            time.sleep(0.2)

    def _drop(self, spec: dict[str, Any]) -> str:
        """Upload a spec as a user does whose upload is interrupted: repeat the upload until the object exists."""
        bucket, name = self.user.settings.specs_bucket, f"specs/crash-{time.time_ns()}.json"
        query = urlencode({"uploadType": "media", "name": name, "ifGenerationMatch": 0})

        def upload() -> str:
            with suppress(urllib.error.HTTPError):  # 412: the object exists
                self._post(f"upload/storage/v1/b/{bucket}/o?{query}", spec)
            return str(self._get(f"storage/v1/b/{bucket}/o/{quote(name, safe='')}")["generation"])

        return names.run_id_of_object(bucket, name, self._until(upload))

    def _cancel(self, run: str) -> bool:
        data = b64encode(json.dumps({"cancel": run}).encode()).decode()
        topic = self.user.settings.topic(self.user.settings.operations_topic)
        return bool(self._post(f"v1/{topic}:publish", {"messages": [{"data": data}]}))

    def _record(self, run: str) -> Record | None:
        name = quote(names.record_object(run), safe="")
        try:
            content = self._get(f"storage/v1/b/{self.user.settings.runs_bucket}/o/{name}?alt=media")
        except urllib.error.HTTPError:
            return None
        return Record.model_validate_json(json.dumps(content))

    def _terminal_record(self, run: str) -> Record | None:
        record = self._record(run)
        return record if record and record.state.is_terminal else None

    def _record_with_ended_endpoint(self, run: str) -> Record | None:
        record = self._record(run)
        return record if record and record.endpoint and record.endpoint.ended else None

    def _executions(self, run: str) -> list[dict[str, Any]]:
        listed = self._get(f"v1/{self.user.settings.workflow_name}/executions?view=FULL&pageSize=20")["executions"]
        return [e for e in listed if e["labels"].get(names.RUN_LABEL) == run]

    def _notices(self, run: str) -> list[str]:
        """Return the event ids in the Slack messages about a run."""
        payloads = [message["payload"] for message in self._get("slack/messages")["messages"]]
        contexts = [p["blocks"][-1]["elements"][0]["text"] for p in payloads]
        return [text.rpartition(" ")[2] for text in contexts if f"`{run}`" in text]

    def _events(self, run: str) -> set[str]:
        """Return the ids of a run's events. Call it once for each run: it acknowledges the events of all runs."""
        answer = self._post(f"v1/{self._subscription}:pull", {"maxMessages": 1000})
        received = answer.get("receivedMessages", [])
        if received:
            self._post(f"v1/{self._subscription}:acknowledge", {"ackIds": [r["ackId"] for r in received]})
        ids = {r["message"]["attributes"]["ce-id"] for r in received}
        return {id_ for id_ in ids if id_.startswith(f"{run}/")}

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.user.info.http}/{path}", timeout=60) as response:
            return json.load(response)

    def _post(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        headers = {"Content-Type": "application/json"}
        url = f"{self.user.info.http}/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)


@dataclass(frozen=True)
class Tried:
    """A try and its result: a line of the results file."""

    case: Case
    commit: int
    result: Result
    tree: str
    state: str

    def __str__(self) -> str:
        row = asdict(self.case) | {"commit": self.commit} | asdict(self.result)
        return json.dumps({**row, "tree": self.tree, "state": self.state})

    @classmethod
    def of(cls, line: str) -> Tried:
        row = json.loads(line)
        case = Case(*(row[name] for name in ("target", "life", "kill", "moment")))
        result = Result(*(row[name] for name in ("killed", "seconds", "problems", "commits")))
        return cls(case, row["commit"], result, row["tree"], row["state"])


@dataclass(frozen=True)
class Plan:
    """The commits of a case to try; there may be more numbers than the life has commits."""

    case: Case
    commits: tuple[int, ...]
    results: Path
    slow: bool = False

    def cut(self) -> tuple[Plan, Plan]:
        """Return a plan with the commits for one stack, and a plan with the other commits."""
        return replace(self, commits=self.commits[:RUNS]), replace(self, commits=self.commits[RUNS:])

    def run(self) -> list[Tried]:
        """Try the commits in a new stack until the lives end without a death; keep the state if a try failed."""
        if not self.slow:
            local._spawn = zygote().spawn
        tries: list[Tried] = []
        home, tree = Path(tempfile.mkdtemp(prefix="dropforge-crash-")), _tree()
        try:
            harness = Harness(home)
            for commit in self.commits:
                tries.append(Tried(self.case, commit, harness.attempt(self.case, commit), tree, str(home)))
                with self.results.open("a") as file:
                    file.write(f"{tries[-1]}\n")
                for problem in tries[-1].result.problems:
                    print(f"{self.case} at commit {commit}: {problem} (see {home})", flush=True)
                if _is_over(tries):
                    break
        finally:
            local.down(home)
        if not any(tried.result.problems for tried in tries):
            shutil.rmtree(home)
        return tries


def _is_over(tries: list[Tried]) -> bool:
    return [tried.result.killed for tried in tries[-ENOUGH:]] == [False] * ENOUGH


@cache
def zygote() -> Zygote:
    """Return the zygote of this process; it ends with this process."""
    return Zygote()


def cases(target: str, kill: str) -> list[Case]:
    """Return the cases of a target.

    A kill of functions or containers does not interrupt a commit of the stack, so "before a commit" is the same as
    "after the previous commit".
    """
    moments = ("before", "after") if kill == "stack" else ("after",)
    lives = [life for life in LIVES if target in SERVES or not LIVES[life].serves]
    return [Case(target, life, kill, moment) for life in lives for moment in moments]


def table(tries: Iterable[Tried]) -> Iterator[str]:
    """Yield a row for each case. The last try at a commit counts; the seconds are those of all tries."""
    rows: dict[Case, dict[int, Tried]] = {}
    seconds: Counter[Case] = Counter()
    for tried in tries:
        rows.setdefault(tried.case, {})[tried.commit] = tried
        seconds[tried.case] += round(tried.result.seconds)
    yield f"{'case':<44} {'tries':>6} {'deaths':>6} {'problems':>8} {'seconds':>8}"
    for case, commits in rows.items():
        deaths = sum(tried.result.killed for tried in commits.values())
        wrong = [commit for commit, tried in commits.items() if tried.result.problems]
        name = f"{case.target} {case.life}: {case.kill} {case.moment}"
        yield f"{name:<44} {len(commits):>6} {deaths:>6} {len(wrong):>8} {seconds[case]:>8}  {wrong or ''}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stack.crash", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", choices=[*PARTS], action="append", help="default: all targets")
    parser.add_argument(
        "--kill", choices=["stack", "functions", "containers"], action="append", help="default: all parts"
    )
    parser.add_argument("--life", choices=[*LIVES], action="append", help="default: all lives")
    parser.add_argument("--moment", choices=["before", "after"], action="append", help="default: both moments")
    parser.add_argument("--all", action="store_true", help="every commit, not every seventh")
    parser.add_argument(
        "--from", type=int, dest="first", metavar="COMMIT", help="the first commit to try; implies --all"
    )
    parser.add_argument("--to", type=int, default=1000, dest="last", metavar="COMMIT", help="the last commit to try")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10_000)
    parser.add_argument("--lanes", type=int, default=1, help="number of stacks at once")
    parser.add_argument("--slow", action="store_true", help="start every stack as users do")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--continue", action="store_true", dest="is_continued", help="skip the tries that succeeded")
    parser.add_argument("--table", action="store_true", help="print the table of the results file; try nothing")
    options = parser.parse_args(arguments)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.touch()
    if not options.table:
        print(f"seed {options.seed}", flush=True)
    known = [Tried.of(line) for line in options.results.read_text().splitlines()]
    tries = known if options.table else _sweep(_plans(options, known), options.lanes)
    print(*table(tries), sep="\n")
    return int(any(tried.result.problems for tried in tries))


def _plans(options: argparse.Namespace, known: Iterable[Tried]) -> list[Plan]:
    draw, stride = random.Random(options.seed), 1 if options.all or options.first else STRIDE
    chosen = [
        case
        for target in options.target or PARTS
        for kill in options.kill or ["stack", "functions", "containers"]
        for case in cases(target, kill)
        if case.life in (options.life or LIVES) and case.moment in (options.moment or ("before", "after"))
    ]
    plans = []
    for case in chosen:
        commits = range(options.first or draw.randrange(stride) + 1, options.last + 1, stride)
        succeeded = {tried.commit for tried in known if tried.case == case and not tried.result.problems}
        skipped = succeeded if options.is_continued else set()
        remaining = tuple(commit for commit in commits if commit not in skipped)
        plans.append(Plan(case, remaining, options.results, options.slow))
    return [plan for plan in plans if plan.commits]


def _sweep(plans: list[Plan], lanes: int) -> list[Tried]:
    """Run the plans in parallel lanes. When a lane reaches the end of a life, drop the rest of the case's plan."""
    tries: list[Tried] = []
    running: dict[Future[list[Tried]], Case] = {}
    with ProcessPoolExecutor(lanes) as pool:
        while plans or running:
            while plans and len(running) < lanes:
                piece, rest = plans[0].cut()
                plans = [rest] * bool(rest.commits) + plans[1:]
                running[pool.submit(piece.run)] = piece.case
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case, finished = running.pop(future), future.result()
                tries += finished
                if _is_over(finished):
                    plans = [plan for plan in plans if plan.case != case]
                print([*table(tried for tried in tries if tried.case == case)][1], flush=True)
    return tries


def _tree() -> str:
    """Return the git commit under test, with a plus if files have changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
