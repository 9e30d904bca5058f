"""`make soak TARGET=… MINUTES=…`: a real training, or an endpoint under light load, for so long, while everything ends.

The local stack is set so that minutes do what hours do: tokens and idle connections end early, all processes stop for a
tenth of the time (a closed laptop), and the training's machine is preempted in the middle. Every five seconds a sample
is taken (_samples.py). The table at the end shows what grows.

Exit code 1: the run did not succeed, an answer of the endpoint was an error, something is left, or the descriptors or
the threads of a kind of process grow steadily.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from tests.stack.conftest import User, user_of
from tests.stack.named import repeated
from tests.stack.targets import PARTS

from dropforge.run.record import Record, RunState
from dropforge.run.series import read_series
from dropforge.spec import parse_spec
from dropforge_cli import demo, named, sources
from dropforge_cli.callee import callee_of
from dropforge_cli.deployment import Deployment, of_stack
from dropforge_cli.endpoints import token_of
from dropforge_cli.problems import CliError
from dropforge_cli.snippet import example
from dropforge_cli.specs import upload_spec
from dropforge_local.stack import control as local
from dropforge_local.stack.config import ROOT, StackConfig

from ._samples import Sampler, family, leaks, table

ENDPOINT = "endpoint"  # what is soaked instead of a training: a named endpoint under light load
SERVED = "cloud_run"  # the target whose spec makes the endpoint's model
STATE = ROOT / "build" / "soak"
SAMPLE_SECONDS = 5.0
CHECKPOINT_SECONDS = 20.0
SHORT_STEPS = 60  # of the run that measures a step
SLEEPS_AT, SLEEPS_FOR, PREEMPTED_AT = 0.25, 0.1, 0.5  # of the minutes
STREAM_EVERY = 5  # requests
CONFIG = StackConfig(
    record=True,
    token_seconds=285,  # google-auth renews a token 225 s before its end: every minute
    keep_alive_seconds=5.0,
)


class Failed(Exception):
    """The soak cannot go on; the message says why."""


class Disturbance(NamedTuple):
    """A fault that strikes when a share of the minutes is over."""

    share: float
    name: str
    strike: Callable[[], object]


class Soak:
    """A soak of one target on a running stack."""

    def __init__(self, state: Path, user: User, deployment: Deployment, target: str, seconds: float) -> None:
        self.state, self.user, self.deployment = state, user, deployment
        self.target, self.seconds = target, seconds
        self.problems: list[str] = []
        self.sampler = Sampler(state, user.info, deployment.clients.storage(), user.settings.runs_bucket)

    def training(self) -> None:
        """Soak a training of the target. Its steps last for the minutes in which the machine is awake."""
        step = self._step_seconds(self._ended(self._drop(SHORT_STEPS, serve=None)))
        steps = max(SHORT_STEPS, round(self.seconds * (1 - SLEEPS_FOR) / step))
        say(f"a step takes {step:.2f} s; the run has {steps}")
        run = self._drop(steps, max(1, round(CHECKPOINT_SECONDS / step)))
        self.user.wait(run, "TRAINING", timeout=self.seconds + 600)
        preemption = Disturbance(PREEMPTED_AT, "preempted", lambda: self._preempt(run))
        self._watch(lambda: self.user.store.record(run).state.is_terminal, [self._sleep, preemption])
        record = self._ended(run)
        if record.endpoint is not None:
            demo.end_endpoint(self.deployment, record)

    def endpoint(self) -> None:
        """Soak a named endpoint."""
        name = "soaked"
        self._ended(self._drop(SHORT_STEPS, serve={"endpoint": name}))
        until = time.monotonic() + self.seconds
        with Load(self.deployment, name, self.seconds).running() as load:
            self._watch(lambda: time.monotonic() > until, [self._sleep])
        say(f"{load.answers} answers, {len(load.errors)} errors")
        if load.errors or not load.answers:
            self.problems.append(
                f"{len(load.errors)} of {len(load.errors) + load.answers} requests failed: {load.errors[:3]}"
            )
        named.change(self.deployment, name, retire=name)

    @property
    def _sleep(self) -> Disturbance:
        return Disturbance(SLEEPS_AT, "asleep", lambda: sleep(self.state, self.user, self.seconds * SLEEPS_FOR))

    def _drop(self, steps: int, checkpoint_steps: int | None = None, **serve: Any) -> str:
        """Drop the target's example, with another length and without a gate; return the run."""
        path = ROOT / "examples" / "local" / f"{SERVED if self.target == ENDPOINT else self.target}.json"
        spec = json.loads(path.read_text())
        del spec["$schema"], spec["evaluation"]["gate"]
        spec["training"] |= {"max_steps": steps, "checkpoint_steps": checkpoint_steps or steps}
        spec["limits"] |= {"max_duration": f"{round(3 * self.seconds / 60) + 60}m", "max_cost_usd": 1000}
        if "serve" in serve:
            spec["serve"] = serve["serve"] and spec["serve"] | serve["serve"]
        spec["training"].pop("epochs", None)
        data = json.dumps(spec).encode()
        sources.prepare(parse_spec(data), self.deployment)
        return upload_spec(self.deployment, data, f"soak-{steps}.json", again=True)

    def _ended(self, run: str) -> Record:
        """The record of a run that has ended. Raises Failed unless it succeeded."""
        record = self.user.wait(run, timeout=3600 + self.seconds)
        if record.state is not RunState.SUCCEEDED:
            raise Failed(f"run {run} is {record.state}: {record.error}")
        return record

    def _step_seconds(self, record: Record) -> float:
        """How long a step of a run took, by its series. Raises Failed."""
        kept = read_series(self.deployment.clients.storage(), self.user.settings.runs_bucket, record.run, 1)
        if kept is None or len(kept.series.step) < 2:
            raise Failed(f"run {record.run} has no series with two points, so the length of a step is unknown")
        steps, seconds = kept.series.step, kept.series.seconds
        return (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])

    def _preempt(self, run: str) -> None:
        if (state := self.user.store.record(run).state) is RunState.TRAINING:
            self.user.preempt(run)
        else:
            self.problems.append(f"no machine was preempted: the run was {state}; its steps were shorter than measured")

    def _watch(self, is_over: Callable[[], bool], disturbances: Sequence[Disturbance]) -> None:
        """Take samples until it is over, and disturb."""
        began, left = time.monotonic(), list(disturbances)
        while not is_over():
            self.sampler.sample()
            if left and time.monotonic() > began + left[0].share * self.seconds:
                due = left.pop(0)
                say(due.name)
                due.strike()
            time.sleep(SAMPLE_SECONDS)
        self.problems += [f"the soak ended before it was {each.name}" for each in left]


class Load:
    """A client that asks a named endpoint each second; some answers are streams."""

    def __init__(self, deployment: Deployment, name: str, seconds: float) -> None:
        import openai

        callee = callee_of(deployment, name)
        self._client = openai.OpenAI(
            base_url=callee.endpoint.base_url, api_key=token_of(deployment, callee.spec), timeout=seconds + 600
        )
        self._model, self._messages = name, example(deployment, callee.record, callee.spec)
        self.answers = 0
        self.errors: list[str] = []

    @contextmanager
    def running(self) -> Iterator[Load]:
        with self._client, repeated(self._ask_once, 1.0):
            yield self

    def _ask_once(self) -> None:
        import openai

        try:
            self._ask(is_stream=self.answers % STREAM_EVERY == 0)
            self.answers += 1
        except openai.OpenAIError as error:
            self.errors.append(repr(error))

    def _ask(self, *, is_stream: bool) -> None:
        messages: Any = self._messages
        answer: Any = self._client.chat.completions.create(
            model=self._model, messages=messages, max_tokens=16, stream=is_stream
        )
        for _ in answer if is_stream else ():
            pass


def sleep(state: Path, user: User, seconds: float) -> None:
    """Stop every process of the stack and of its containers for so long, as a laptop does that is closed."""
    stopped: set[psutil.Process] = set()
    try:
        while new := set(family(state, user.info)) - stopped:  # a process may have started another meanwhile
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            stopped |= new
        time.sleep(seconds)
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def soak(target: str, minutes: float, state: Path) -> list[str]:
    """Soak a target on a new stack, print the table, and return the problems."""
    if tool := demo.ENVIRONMENTS.get(f"training on {target}"):
        demo.make_environment(tool)
    local.down(state, delete=True)
    CONFIG.save(state)
    try:
        deployment = of_stack(local.up(state))
        each = Soak(state, user_of(state), deployment, target, minutes * 60)
        try:
            each.endpoint() if target == ENDPOINT else each.training()
        except (Failed, AssertionError, CliError) as error:
            each.problems.append(str(error))
        print(*table(each.sampler.series), sep="\n", flush=True)
        problems = each.problems + leaks(each.sampler.series)
    finally:
        local.down(state)
    left = local.leftovers(state)
    say(f"{len(left.resources)} resources, {len(left.processes)} processes, {len(left.ports)} ports are left")
    return problems + ([f"left: {left}"] if left else [])


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench._soak", description=__doc__)
    parser.add_argument("target", choices=[*PARTS, ENDPOINT])
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="how long it trains or serves (30)")
    parser.add_argument("--state", type=Path, default=STATE, metavar="DIR", help="the stack's state directory")
    options = parser.parse_args(arguments)
    if problems := soak(options.target, options.minutes, options.state.resolve()):
        sys.exit("\n".join(problems))
    say("succeeded")


if __name__ == "__main__":
    main()
