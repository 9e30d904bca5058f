"""Many random inputs for the deployed functions, in this process and against the simulated cloud of chaos.

    python -m tests.fuzz --count 100000 --seed 0

An input is a spec as an upload or a message, a request, a job event, an envelope of an event, or a call of a stage: an
example with one to three values replaced, removed or moved, or with its bytes damaged. Every event must be
acknowledged, every call answered below 500, and only a spec that `parse_spec` accepts may start an execution. The suite
tries fewer inputs, against the emulators' sockets (test_specs.py, test_events.py).
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dropforge.base.errors import InvalidSpec
from dropforge.spec import parse_spec
from dropforge_local.chaos.cloud import REQUESTS, SPECS, Cloud, deployment
from dropforge_local.chaos.faults import Strike
from dropforge_local.chaos.functions import call_stage, entry_points, event_of, give_context, topic_source
from dropforge_local.chaos.seam import context_of
from dropforge_local.chaos.world import World

from .documents import ODD_NUMBERS, ODD_TEXT, places

EXAMPLES = Path(__file__).resolve().parents[2] / "schemas" / "examples"
VALID = [json.loads(path.read_text()) for path in sorted((EXAMPLES / "valid").glob("*.json"))]
RUN = "fuzzed-0123456789ab"
TIME = "2026-01-01T00:00:00Z"
BASE = {"run": RUN, "attempt": 1, "sequence": 1, "time": TIME}
EVENTS = [
    {**BASE, "type": "started", "resumed_step": 0, "device": "cpu"},
    {**BASE, "type": "checkpoint", "step": 1, "uri": "gs://b/checkpoints/x"},
    {**BASE, "type": "succeeded", "manifest_uri": "gs://b/models/x/MANIFEST.json", "metrics": {"loss": 0.1}},
    {**BASE, "type": "failed", "error_class": "code", "message": "m", "hint": ""},
    {**BASE, "type": "preempted", "step": 1},
    {**BASE, "type": "preempted", "step": 1, "started": {"sequence": 0, "time": TIME, "resumed_step": 0, "device": ""}},
]
CALL = {**BASE, "execution": "e-1", "callback_url": "http://127.0.0.1:1/", "scope": "run"}
ERROR = {"error_class": "code", "message": "m", "hint": ""}
CALL |= {"keep_endpoint": False, "outcome": {"state": "FAILED", "error": ERROR}}
UPLOAD = {"bucket": SPECS, "name": "specs/absent.json", "generation": "1", "size": "2"}
REQUESTED = [{"cancel": RUN}, {"spec_uri": f"gs://{SPECS}/specs/absent.json"}, {"spec_uri": "gs://other/x.json"}]
STAGES = ("provision", "inspect", "deploy", "teardown")
ODD: list[Any] = [None, True, [], {}, [[]], {"a": []}, *ODD_TEXT, *ODD_NUMBERS]
LIFE_INPUTS = 200  # then another simulated cloud: the first one remembers everything


class Fuzzer:
    """Draws inputs from one seed and gives them to the functions of a cloud without faults."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._renew()

    def try_one(self) -> None:
        """One input, of a kind that the seed chooses."""
        if sum(self.counts.values()) % LIFE_INPUTS == LIFE_INPUTS - 1:
            self._renew()
        kind = self._draw.choice((self._upload, self._message, self._job_event, self._envelope, self._call))
        self.counts[kind.__name__.strip("_")] += 1
        kind()

    def _renew(self) -> None:
        world = World(0, Strike(0, ""))
        self._cloud = Cloud(world)
        self._main = entry_points()
        give_context(self._main, context_of(world, self._cloud.clients(), deployment()))

    def _upload(self) -> None:
        data = self._data(VALID)
        generation = self._cloud.storage.put(SPECS, "specs/x.json", data)
        size = {"generation": str(generation), "size": str(len(data))}
        self._deliver("on_spec_uploaded", {**UPLOAD, "name": "specs/x.json", **size}, data)

    def _message(self) -> None:
        data = self._data([*VALID, *REQUESTED])
        self._deliver("on_spec_message", self._message_of(data), data)

    def _job_event(self) -> None:
        data = self._data(EVENTS)
        self._deliver("on_job_event", self._message_of(data), data)

    def _envelope(self) -> None:
        entry = self._draw.choice(("on_spec_uploaded", "on_spec_deleted", "on_spec_message", "on_job_event"))
        envelope = UPLOAD if "spec_" in entry and "message" not in entry else self._message_of(b"{}")
        self._deliver(entry, self._changed([envelope]), b"")

    def _call(self) -> None:
        name, body = self._draw.choice(STAGES), self._changed([CALL])
        self._check(name, body, b"", lambda: call_stage(self._main, name, body)[0] < 500)

    def _deliver(self, name: str, data: Any, spec: bytes) -> None:
        def acknowledged() -> bool:
            getattr(self._main, name)(event_of(topic_source(REQUESTS), data))
            return True

        self._check(name, data, spec, acknowledged)

    def _check(self, name: str, shown: Any, spec: bytes, answered: Callable[[], bool]) -> None:
        before = len(self._cloud.workflows.executions)
        try:
            if not answered():
                self.problems.append(f"{name} answered 500 or more to {shown!r:.500}")
        except Exception:  # noqa: BLE001  (any exception is a finding)
            self.problems.append(f"{name} failed with {shown!r:.500}: {traceback.format_exc()[-1500:]}")
        started = len(self._cloud.workflows.executions) - before
        self.counts["executions"] += started
        if started and not is_spec(spec):
            self.problems.append(f"{name} started an execution for {spec!r:.500}")

    def _message_of(self, data: bytes) -> dict[str, Any]:
        key = f"m{self._draw.randrange(10**9)}"
        return {"message": {"data": base64.b64encode(data).decode(), "messageId": key, "attributes": {}}}

    def _data(self, documents: Sequence[Any]) -> bytes:
        """The bytes of a changed document; of every third one, damaged bytes."""
        data = bytearray(json.dumps(self._changed(documents)).encode())
        if self._draw.random() < 1 / 3:
            at = self._draw.randrange(len(data))
            data[at : at + self._draw.randrange(3)] = self._draw.randbytes(self._draw.randrange(3))
        return bytes(data)

    def _changed(self, documents: Sequence[Any]) -> Any:
        document = copy.deepcopy(self._draw.choice(documents))
        for _ in range(self._draw.randint(1, 3)):
            known = list(places(document))
            if not known:
                break
            (container, key), other = self._draw.choice(known), self._draw.choice(known)
            change = self._draw.randrange(4)
            if change == 0:
                del container[key]
            elif change == 1:
                container[key] = copy.deepcopy(other[0][other[1]])
            elif change == 2 and isinstance(container, dict):
                container[self._draw.choice(ODD_TEXT)] = copy.deepcopy(self._draw.choice(ODD))
            else:
                container[key] = copy.deepcopy(self._draw.choice(ODD))  # it may be changed next
        return document


def is_spec(data: bytes) -> bool:
    try:
        parse_spec(data)
    except InvalidSpec:
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    """Try the inputs; print the figures and the first problems. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--count", type=int, default=100_000, metavar="N", help="number of inputs")
    parser.add_argument("--seed", type=int, default=0, help="the source of all inputs")
    options = parser.parse_args(arguments)
    fuzzer, began = Fuzzer(options.seed), time.monotonic()
    for _ in range(options.count):
        fuzzer.try_one()
    executions = fuzzer.counts.pop("executions", 0)
    listed = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in sorted(fuzzer.counts.items()))
    print(f"{options.count:,} inputs ({listed}) in {time.monotonic() - began:.0f} s")
    print(f"{executions:,} executions, each for a valid spec; {len(fuzzer.problems)} problems")
    print("\n".join(fuzzer.problems[:10]))
    return 1 if fuzzer.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
