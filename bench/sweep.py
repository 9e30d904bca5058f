"""A sweep over many live runs, each with a mark, a record and a Cloud Run job. One live execution owns all runs.

sweep, nothing to do     the sweep lists all resources and reads all records (`python -m bench.sweep --runs N`)
sweep with orphans       the records of some runs are terminal: the sweep deletes their jobs and verifies the deletion

The sweep runs in this process, as it runs in its function. The stack, which is the cloud, uses the same cores.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from typing import Any

from .stack import User, running_stack

RUNS, ORPHANS, SWEEPS, WORKERS = 10_000, 200, 3, 16


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sweep")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="live runs, each with a resource")
    parser.add_argument(
        "--orphans", type=int, default=ORPHANS, metavar="N", help="number of runs that end and become orphans"
    )
    options = parser.parse_args(arguments)
    with running_stack() as (_, info):
        from dropforge.stages.sweep.sweep import sweep as sweep_all

        user = User(info)

        def sweep() -> dict[str, Any]:
            return sweep_all(user.context).to_json()

        execution = _live_execution(user)
        runs = [f"swept-{number:012x}" for number in range(options.runs)]
        began = time.perf_counter()
        _for_each(lambda run: _make(user, run, execution), runs)
        print(f"created {options.runs} runs in {time.perf_counter() - began:.0f} s", flush=True)
        spent = [_timed(sweep, deleted=0) for _ in range(SWEEPS)]
        print(f"sweep, nothing to do     {statistics.median(spent):6.1f} s   {options.runs} runs and jobs", flush=True)
        _for_each(lambda run: _end(user, run), runs[: options.orphans])
        seconds = _timed(sweep, deleted=options.orphans)
        print(f"sweep with orphans       {seconds:6.1f} s   {options.orphans} jobs deleted")


def _live_execution(user: User) -> str:
    """Start a run that does not end before the benchmark; return its execution."""
    run = user.drop("owner", "hang")
    while not (record := user.store.find(run)) or record.state != "TRAINING" or not record.execution:
        time.sleep(0.1)
    return record.execution


def _make(user: User, run: str, execution: str) -> None:
    from dropforge.base import names
    from dropforge.base.clock import utc_now
    from dropforge.run.record import Attempt, Record, RunState, Transition

    now = utc_now()
    attempt = Attempt(number=1, placement=0, region="us-central1", started=now, deadline=now)
    history = [Transition(state=state, time=now) for state in (RunState.ACCEPTED, RunState.TRAINING)]
    record = Record(
        run=run, name="swept", source="bench", state=RunState.TRAINING, created=now, history=history,
        execution=execution, attempts=[attempt],
    )  # fmt: skip
    user.store.create(record)
    owner = {names.ATTEMPT_LABEL: "1", names.DEPLOYMENT_LABEL: user.settings.deployment}
    job: dict[str, Any] = {"labels": names.labels(run, owner)}
    job["template"] = {"template": {"containers": [{"image": user.settings.train_trl_image}]}}
    parent = f"projects/{user.settings.project}/locations/us-central1"
    user.clients.run_jobs().create_job(parent=parent, job=job, job_id=names.training_name(run, 1))


def _end(user: User, run: str) -> None:
    from dropforge.base.clock import utc_now
    from dropforge.run.record import RunState

    for state in (RunState.TEARING_DOWN, RunState.FAILED):
        user.store.update(run, lambda record, state=state: record.entered(state, utc_now()))  # type: ignore[misc]


def _timed(sweep: Callable[[], dict[str, Any]], deleted: int) -> float:
    with redirect_stderr(io.StringIO()):
        began = time.perf_counter()
        answer = sweep()
        spent = time.perf_counter() - began
    counts = {key: len(answer[key]) for key in ("deleted", "deleting", "restarted", "resubmitted", "problems")}
    assert counts == dict.fromkeys(counts, 0) | {"deleted": deleted}, json.dumps(answer)[:2000]
    return spent


def _for_each(call: Callable[[str], None], runs: Iterable[str]) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(call, runs))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
