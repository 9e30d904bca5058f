"""Kill a part of a whole stack at one of its commits, start it again, and see that nothing is lost, left or doubled.

    python -m tests.stack.crash --target gke --all --lanes 2

tries every commit of every life (LIVES) on a target, prints a line for each that went wrong and a table at the end.
Containers train nothing. Without --all every seventh commit is tried, from a place that --seed draws. One that went
wrong is tried again by

    python -m tests.stack.crash --target gke --life success --kill stack --moment after --from 37 --to 37

Every try is a line of build/crash.jsonl. With --continue those that went well are not tried again, and --table sums up
the file. Stacks are forked (zygote.py) from one process that has imported them; --slow starts them as users do.
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
from dropforge.run.record import Record, RunState
from dropforge_local.stack import control as local
from dropforge_local.stack.config import ROOT, StackError

from .conftest import NOOP_CONFIG, user_of
from .targets import PARTS, SERVES
from .zygote import Zygote

T = TypeVar("T")
STRIDE = 7
ENOUGH = 3  # lives in a row that ended before anybody was killed: one has a few commits more than another
RUNS = 30  # in one stack; the events of Kubernetes that they leave make every later one dearer
TIMEOUT = 60.0
LOOK_SECONDS = 0.1
RESULTS = Path("build/crash.jsonl")
UNREACHABLE = (OSError, http.client.HTTPException)
NOTICES = {RunState.ACCEPTED, RunState.TRAINING, RunState.SUCCEEDED, RunState.FAILED}


class Life(NamedTuple):
    """What a run's container does, and what must come of the run whoever is killed when."""

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
    """A life on a target, and who is killed at which moment of a commit."""

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
    """What came of one try: whether anybody was killed at all, how long it took, what is wrong, its commits."""

    killed: bool
    seconds: float
    problems: list[str]
    commits: int = 0


class Harness:
    """A stack that dies as often as it is told to; the runs before stay in it, as they would."""

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
        """One life, with a death at its commit with that number; 0 for none."""
        begin, life = time.monotonic(), LIVES[case.life]
        self._until(lambda: self._post("_local/crash", {"commit": 0}))
        self._settle()
        self._post("_local/crash", {"commit": commit, "moment": case.moment, "kill": case.kill})
        run = self._drop(self.user.spec(life.behave, **case.spec))
        try:
            record = self._until(lambda: self._ended(run))
            if record.endpoint:
                self._until(lambda: self._cancel(run))
                record = self._until(lambda: self._without_endpoint(run))
            self._until(lambda: all(e["state"] != "ACTIVE" for e in self._executions(run)))
        except TimeoutError:
            return Result(True, time.monotonic() - begin, [f"{run} came to no end: {self._record(run)!r}"])
        except StackError as error:
            return Result(True, time.monotonic() - begin, [f"{run}: the stack does not start again: {error}"])
        switch = self._get("_local/crash")
        self._post("_local/crash", {"commit": 0})
        killed = bool(commit) and not switch["armed"]["commit"]
        found = [f"{run} {problem}" for problem in self._problems(record, case, killed)]
        return Result(killed, time.monotonic() - begin, found, switch["commits"])

    def _problems(self, record: Record, case: Case, killed: bool) -> Iterator[str]:
        """What a run must not have left or done, whoever was killed when."""
        run, life = record.run, LIVES[case.life]
        more = int(killed and case.kill == "containers")  # that costs an attempt
        if record.state is not life.state:
            yield f"is {record.state}, {record.error!r}; expected {life.state}"
        if not life.attempts <= len(record.attempts) <= life.attempts + more:
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
        again = killed and case.kill == "containers" and case.target == "ray"  # a new head gets the job again
        yield from self._training_problems(run, 1 + again)

    def _ledger_problems(self, run: str) -> Iterator[str]:
        ledger = self.user.store.ledger(run)
        if remaining := [entry.name for entry in ledger.remaining()]:
            yield f"believes to have {remaining}"
        made = Counter((entry.kind, entry.attempt, names.is_endpoint(entry.name, run)) for entry in ledger.entries)
        if doubled := [key for key, count in made.items() if count > 1]:
            yield f"has more than one of {doubled} in an attempt"

    def _execution_problems(self, record: Record) -> Iterator[str]:
        found = {e["name"].rsplit("/", 1)[1]: json.loads(e.get("result", "{}")) for e in self._executions(record.run)}
        effective = [name for name, result in found.items() if result.get("status") != "SUPERSEDED"]
        if effective != [record.execution]:
            yield f"has the effective executions {effective}; expected {record.execution} alone"

    def _notice_problems(self, record: Record) -> Iterator[str]:
        """Each state that people care about was told, and what was told twice has one id."""
        expected = {f"{record.run}/{t.attempt}/{t.state.lower()}" for t in record.history if t.state in NOTICES}
        told = {key for key in self._notices(record.run) if "/notice/" not in key}  # a sweep's, if one came by
        if told != expected:
            yield f"told people {sorted(told)}; expected {sorted(expected)}"
        events = self._events(record.run)
        if (last := f"{record.run}/{record.history[-1].attempt}/{record.state.lower()}") not in events:
            yield f"did not tell other systems {last}; it told {sorted(events)}"
        changes = {key for key in events if "/notice/" not in key}
        if unknown := changes - {f"{record.run}/{t.attempt}/{t.state.lower()}" for t in record.history}:
            yield f"told other systems {sorted(unknown)}, which it never was"

    def _training_problems(self, run: str, times: int) -> Iterator[str]:
        """Each container that trains says so so many times at most, with an attempt's number of its own."""
        started = [name for name in self.user.store.names(names.events_prefix(run)) if name.endswith("-started.json")]
        attempts = Counter(name.rsplit("/", 1)[1].split("-")[0] for name in started)
        if doubled := [attempt for attempt, count in attempts.items() if count > times]:
            yield f"trained more than {times} times in attempts {doubled}"

    def _until(self, look: Callable[[], T | None], timeout: float = TIMEOUT) -> T:
        """What `look` answers once that is something; the stack is started again whenever it is dead."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with suppress(*UNREACHABLE):
                if found := look():
                    return found
            if local.running(self.state) is None:
                local.up(self.state)
            time.sleep(LOOK_SECONDS)
        raise TimeoutError

    def _settle(self) -> None:
        """Until nothing of the run before is still being written: the next one's commits are counted."""
        seen = -1
        while seen != (now := self._get("_local/crash")["commits"]):
            seen = now
            time.sleep(0.2)

    def _drop(self, spec: dict[str, Any]) -> str:
        """As a user does whose upload is cut off: again, unless it has arrived."""
        bucket, name = self.user.settings.specs_bucket, f"specs/crash-{time.time_ns()}.json"
        query = urlencode({"uploadType": "media", "name": name, "ifGenerationMatch": 0})

        def upload() -> str:
            with suppress(urllib.error.HTTPError):  # 412: it is there
                self._post(f"upload/storage/v1/b/{bucket}/o?{query}", spec)
            return str(self._get(f"storage/v1/b/{bucket}/o/{quote(name, safe='')}")["generation"])

        return names.run_id_of_object(bucket, name, self._until(upload))

    def _cancel(self, run: str) -> bool:
        data = b64encode(json.dumps({"cancel": run}).encode()).decode()
        topic = self.user.settings.topic(self.user.settings.requests_topic)
        return bool(self._post(f"v1/{topic}:publish", {"messages": [{"data": data}]}))

    def _record(self, run: str) -> Record | None:
        name = quote(names.record_object(run), safe="")
        try:
            found = self._get(f"storage/v1/b/{self.user.settings.runs_bucket}/o/{name}?alt=media")
        except urllib.error.HTTPError:
            return None
        return Record.model_validate_json(json.dumps(found))

    def _ended(self, run: str) -> Record | None:
        record = self._record(run)
        return record if record and record.state.is_terminal else None

    def _without_endpoint(self, run: str) -> Record | None:
        record = self._record(run)
        return record if record and record.endpoint and record.endpoint.ended else None

    def _executions(self, run: str) -> list[dict[str, Any]]:
        listed = self._get(f"v1/{self.user.settings.workflow_name}/executions?view=FULL&pageSize=20")["executions"]
        return [e for e in listed if e["labels"].get(names.RUN_LABEL) == run]

    def _notices(self, run: str) -> list[str]:
        """The ids in the Slack messages about a run."""
        payloads = [message["payload"] for message in self._get("slack/messages")["messages"]]
        contexts = [p["blocks"][-1]["elements"][0]["text"] for p in payloads]
        return [text.rpartition(" ")[2] for text in contexts if f"`{run}`" in text]

    def _events(self, run: str) -> set[str]:
        """The ids of the run events about a run, and of no other: each run is asked for once."""
        found = self._post(f"v1/{self._subscription}:pull", {"maxMessages": 1000})
        received = found.get("receivedMessages", [])
        if received:
            self._post(f"v1/{self._subscription}:acknowledge", {"ackIds": [r["ackId"] for r in received]})
        ids = {r["message"]["attributes"]["ce-id"] for r in received}
        return {one for one in ids if one.startswith(f"{run}/")}

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.user.info.http}/{path}", timeout=10) as response:
            return json.load(response)

    def _post(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        headers = {"Content-Type": "application/json"}
        url = f"{self.user.info.http}/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)


@dataclass(frozen=True)
class Tried:
    """A line of the results."""

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
    """Commits of a life that are to be tried, as many as it might have."""

    case: Case
    commits: tuple[int, ...]
    results: Path
    slow: bool = False

    def cut(self) -> tuple[Plan, Plan]:
        """What one stack is enough for, and the rest."""
        return replace(self, commits=self.commits[:RUNS]), replace(self, commits=self.commits[RUNS:])

    def run(self) -> list[Tried]:
        """In a stack of its own, until the lives end before anybody is killed; the state is kept if one went wrong."""
        if not self.slow:
            local._spawn = zygote().spawn
        found: list[Tried] = []
        home, tree = Path(tempfile.mkdtemp(prefix="dropforge-crash-")), _tree()
        try:
            harness = Harness(home)
            for commit in self.commits:
                found.append(Tried(self.case, commit, harness.attempt(self.case, commit), tree, str(home)))
                with self.results.open("a") as file:
                    file.write(f"{found[-1]}\n")
                for problem in found[-1].result.problems:
                    print(f"{self.case} at commit {commit}: {problem} (see {home})", flush=True)
                if _is_over(found):
                    break
        finally:
            local.down(home)
        if not any(tried.result.problems for tried in found):
            shutil.rmtree(home)
        return found


def _is_over(found: list[Tried]) -> bool:
    return [tried.result.killed for tried in found[-ENOUGH:]] == [False] * ENOUGH


@cache
def zygote() -> Zygote:
    """This process's; it ends with it."""
    return Zygote()


def cases(target: str, kill: str) -> list[Case]:
    """Functions and containers die of their own: to them, before a commit is as good as after the one before it."""
    moments = ("before", "after") if kill == "stack" else ("after",)
    lives = [life for life in LIVES if target in SERVES or not LIVES[life].serves]
    return [Case(target, life, kill, moment) for life in lives for moment in moments]


def table(tries: Iterable[Tried]) -> Iterator[str]:
    """A row for each case. Of several tries at one commit the last one counts, but for the time they took."""
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
    parser.add_argument("--target", choices=[*PARTS], action="append", help="default: all of them")
    parser.add_argument("--kill", choices=["stack", "functions", "containers"], action="append", help="likewise")
    parser.add_argument("--life", choices=[*LIVES], action="append", help="likewise")
    parser.add_argument("--moment", choices=["before", "after"], action="append", help="likewise")
    parser.add_argument("--all", action="store_true", help="every commit, not every seventh")
    parser.add_argument("--from", type=int, dest="first", metavar="COMMIT", help="the first to try; implies --all")
    parser.add_argument("--to", type=int, default=1000, dest="last", metavar="COMMIT", help="the last to try")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10_000)
    parser.add_argument("--lanes", type=int, default=1, help="how many stacks at once")
    parser.add_argument("--slow", action="store_true", help="start every stack as users do")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--continue", action="store_true", dest="go_on", help="without what went well by the results")
    parser.add_argument("--table", action="store_true", help="sum up the results, try nothing")
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
        well = {tried.commit for tried in known if options.go_on and tried.case == case and not tried.result.problems}
        left = tuple(commit for commit in commits if commit not in well)
        plans.append(Plan(case, left, options.results, options.slow))
    return [plan for plan in plans if plan.commits]


def _sweep(plans: list[Plan], lanes: int) -> list[Tried]:
    """A piece of a plan in each lane: what is behind the end of a life is cut off once one lane has seen that."""
    found: list[Tried] = []
    running: dict[Future[list[Tried]], Case] = {}
    with ProcessPoolExecutor(lanes) as pool:
        while plans or running:
            while plans and len(running) < lanes:
                piece, rest = plans[0].cut()
                plans = [rest] * bool(rest.commits) + plans[1:]
                running[pool.submit(piece.run)] = piece.case
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case, tries = running.pop(future), future.result()
                found += tries
                if _is_over(tries):
                    plans = [plan for plan in plans if plan.case != case]
                print([*table(tried for tried in found if tried.case == case)][1], flush=True)
    return found


def _tree() -> str:
    """The commit that is tried; with a plus when files have changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
