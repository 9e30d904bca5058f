"""`dropforge smoke`: run the smallest real run on each target of a deployment, and check every promise.

In a real project it costs at most --max-cost-usd. In every case it ends everything it started.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from dropforge import __version__
from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.figures import duration, usd
from dropforge.base.redact import cut
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.listing import Unlisted
from dropforge.platforms import get_target
from dropforge.platforms import targets as known_targets
from dropforge.run.record import RunState
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec, seconds

from . import INTERRUPTED
from .deployment import Deployment, connect
from .display import stdout, table, titled
from .follow import Follower
from .options import state_option
from .plain import echo
from .problems import FAILED as EXIT_FAILED
from .runs import request_cancel
from .smoke_checks import (
    BY_HAND,
    FAILED,
    NOT_CHECKED,
    PASSED,
    PROMISES,
    Result,
    Seen,
    audit_clean,
    check_endpoint,
    check_run,
    executions_listed,
    implied,
    refusals,
    safely,
)
from .smoke_plan import Options, plan_runs
from .specs import upload_spec

T = TypeVar("T")
SPARE_SECONDS = 1800.0  # after a run's own limits; then the run counts as lost
LOCAL_ENDING_SECONDS, CLOUD_ENDING_SECONDS = 60.0, 1200.0


def _targets(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names when the command runs: its import must not load the platforms. Raises BadParameter."""
    for target in values:
        if target not in known_targets():
            raise click.BadParameter(f"{target!r} is not one of {', '.join(known_targets())}")
    return values


def _by_target(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Parse TARGET=VALUE, any number of times. Raises BadParameter."""
    parsed = {}
    for value in values:
        target, _, rest = value.partition("=")
        if target not in known_targets() or not rest:
            raise click.BadParameter(f"{value!r}; expected TARGET=…, with a target of {', '.join(known_targets())}")
        parsed[target] = rest
    return parsed


def _prices(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    """Parse TARGET=USD, any number of times. Raises BadParameter."""
    prices = {}
    for target, text in _by_target(context, option, values).items():
        try:
            prices[target] = float(text)
        except ValueError:
            raise click.BadParameter(f"{target}={text}; expected US dollars per hour, as in {target}=1.2") from None
        if not 0 < prices[target] < math.inf:
            raise click.BadParameter(f"{target}={text}; expected more than 0 US dollars per hour")
    return prices


@click.command()
@click.option(
    "--max-cost-usd", type=click.FloatRange(0, min_open=True), required=True, help="Maximum cost of all runs together."
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="TARGET",
    callback=_targets,
    help="Default: all targets of the deployment.",
)
@click.option("--price", "prices", multiple=True, metavar="TARGET=USD", callback=_prices, help="Price per hour.")
@click.option("--place", "places", multiple=True, metavar="TARGET=PLACE", callback=_by_target, help="Region or zone.")
@click.option("--yes", is_flag=True, help="Do not ask before it starts.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the report to this file.")
@state_option
def smoke(
    max_cost_usd: float,
    targets: tuple[str, ...],
    prices: dict[str, float],
    places: dict[str, str],
    yes: bool,
    output: Path | None,
    state: str | None,
) -> None:
    """Train on each target of a deployment, check every promise, end everything; exit 1 if a promise is broken."""
    deployment = connect(state)
    runs = plan_runs(deployment.settings, Options(targets, prices, places), max_cost_usd)
    show_estimate(runs, deployment, max_cost_usd)
    if not yes:
        click.confirm("Start these runs?", abort=True)
    test = Smoke(deployment, runs, max_cost_usd)
    interrupted = test.run(stdout())
    text = test.report()
    echo(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if interrupted:
        raise SystemExit(INTERRUPTED)
    if test.has_failed:
        raise SystemExit(EXIT_FAILED)


def show_estimate(runs: list[Seen], deployment: Deployment, max_cost_usd: float) -> None:
    """Print the planned runs and their maximum cost."""
    out, rows = stdout(), table("target", "where", "limit", "at most", right=("at most",))
    for run in runs:
        where = ", ".join(get_target(run.target).regions(run.spec))
        rows.add_row(run.label, where, run.spec.limits.max_duration, usd(run.limit_usd))
    out.print(titled("smoke", deployment.where))
    out.print(rows)
    out.print(f"at most {usd(sum(run.limit_usd for run in runs))} of {usd(max_cost_usd)}")


class Smoke:
    """One smoke test: call `run`, then `report`."""

    def __init__(self, deployment: Deployment, runs: list[Seen], max_cost_usd: float) -> None:
        self.deployment = deployment
        self.runs = runs
        self.max_cost_usd = max_cost_usd
        self.results: list[Result] = []
        self.problems: list[str] = []  # problems that belong to no promise
        self.began = utc_now()
        self._store: RunStore = deployment.store
        self._interrupted = threading.Event()
        self._followers: dict[str, Follower] = {}
        self._refused: dict[str, float] = {}  # by run: since when every request about it was refused

    @property
    def has_failed(self) -> bool:
        return bool(self.problems) or any(result.status == FAILED for result in self.results)

    def run(self, out: Console) -> bool:
        """Start, follow, end and check the runs; return whether a signal interrupted the test."""
        # On the console that gets the lines: another one would write into them.
        with _interrupts(self._interrupted), out.status("following the runs"):
            try:
                self._guarded(self._follow, out)
            finally:
                self._end(out)
        with out.status("checking the promises"):
            self._check()
        return self._interrupted.is_set()

    def _drop(self, out: Console) -> None:
        for seen in self.runs:
            if self._interrupted.is_set():
                return
            data = seen.spec.model_dump_json(by_alias=True, exclude_unset=True).encode()
            seen.run = upload_spec(self.deployment, data, seen.object_name)
            self._followers[seen.run] = Follower(self._store, seen.run)
            out.print(f"dropped {seen.label}: {seen.run}")

    def _follow(self, out: Console) -> None:
        """Drop the specs and observe the runs until all are over, or must be over by their own limits."""
        self._drop(out)
        began = time.monotonic()
        while any(not seen.is_over for seen in self.runs) and not self._interrupted.is_set():
            passed = time.monotonic() - began
            for seen in self.runs:
                if seen.record is None and passed > self.deployment.patience_seconds:
                    self.problems.append(f"{seen.run} did not appear within {self.deployment.patience_seconds:.0f} s")
                    return
                self._observe_unless_refused(seen, out)
            if passed > max(_allowed_seconds(seen.spec) for seen in self.runs) + SPARE_SECONDS:
                self.problems.append("not every run ended within its own limits")
                return
            self._interrupted.wait(self.deployment.poll_seconds)

    def _observe_unless_refused(self, seen: Seen, out: Console) -> None:
        """Ignore a refusal. Raise it if every request was refused for as long as a run may take to appear."""
        try:
            self._observe(seen, out)
        except refusals():
            since = self._refused.setdefault(seen.run, time.monotonic())
            if time.monotonic() - since > self.deployment.patience_seconds:
                raise
        else:
            self._refused.pop(seen.run, None)

    def _observe(self, seen: Seen, out: Console) -> None:
        if seen.is_over or (snapshot := self._followers[seen.run].snapshot()) is None:
            return
        if seen.record is None or seen.record.state is not snapshot.record.state:
            passed = (utc_now() - self.began).total_seconds()
            out.print(f"{passed:7.1f} s  {seen.label}: {snapshot.record.state.lower()}")
        seen.record, seen.ledger = snapshot.record, self._store.ledger(seen.run)
        seen.events |= {event.type: event for event in snapshot.events}
        seen.progress = snapshot.progress or seen.progress
        if not seen.is_over:
            self._observe_training(seen)
        elif seen.record.endpoint is not None and seen.record.endpoint.ended is None:
            seen.answers = check_endpoint(seen, seen.record.endpoint, self.deployment)
            request_cancel(self.deployment, seen.run)

    def _observe_training(self, seen: Seen) -> None:
        """List the training resource while it exists. Cancel a run that is planned to be cancelled."""
        is_training = seen.record is not None and seen.record.state is RunState.TRAINING
        created = [entry for entry in seen.ledger.remaining() if entry.created and not entry.is_endpoint(seen.run)]
        if not created:
            return
        if seen.cancels and not seen.cancel_asked and is_training:
            if seen.target == "cloud_run":
                seen.task_seconds = _task_seconds(self.deployment, created[0].name)
            request_cancel(self.deployment, seen.run)
            seen.cancel_asked = True
        if not seen.training and not seen.cancels:
            with suppress(Unlisted):  # it names other places; the resources of this run were yielded before
                for resource in get_target(seen.target).listed(self.deployment.context.cloud):
                    seen.training += [resource] if resource.run == seen.run else []
            if seen.target == "cloud_run":
                seen.executions = _executions(self.deployment, [entry.name for entry in created])

    def _end(self, out: Console) -> None:
        """Request the end of every run that is not over, and wait until every resource is gone."""
        if self._interrupted.is_set():
            out.print("interrupted: ending every run")
        self._guarded(self._find_dropped)
        left = [seen for seen in self.runs if seen.run and not self._guarded(self._is_gone, seen)]
        patience = LOCAL_ENDING_SECONDS if self.deployment.stack else CLOUD_ENDING_SECONDS
        deadline = time.monotonic() + patience
        for seen in left:
            out.print(f"ending {seen.label}: {seen.run}")
            self._guarded(request_cancel, self.deployment, seen.run)
        while left and time.monotonic() < deadline:
            left = [seen for seen in left if not self._guarded(self._is_gone, seen)]
            time.sleep(self.deployment.poll_seconds if left else 0)
        self.problems += [f"{seen.run} was not gone after {patience:.0f} s" for seen in left]

    def _find_dropped(self) -> None:
        """Find the runs whose upload succeeded without an answer."""
        bucket = self.deployment.clients.storage().bucket(self.deployment.settings.specs_bucket)
        for seen in self.runs if self.problems else []:
            if not seen.run and (blob := bucket.get_blob(seen.object_name, timeout=TIMEOUT_SECONDS)) is not None:
                seen.run = names.run_id_of_object(bucket.name, seen.object_name, blob.generation)

    def _guarded(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Call `act`, and record a refusal as a problem, so that the test still ends the other runs."""
        try:
            return act(*arguments)
        except refusals() as error:
            problem = f"{type(error).__name__}: {cut(str(error), 300)}"
            self.problems += [problem] if problem not in self.problems else []
            return None

    def _is_gone(self, seen: Seen) -> bool:
        seen.record, seen.ledger = self._store.find(seen.run), self._store.ledger(seen.run)
        endpoint = seen.record.endpoint if seen.record else None
        return seen.is_over and not seen.ledger.remaining() and (endpoint is None or endpoint.ended is not None)

    def _check(self) -> None:
        dropped = [seen for seen in self.runs if seen.run]
        for seen in dropped:
            self.results += check_run(seen, self._store, self.deployment)
        self.results.append(safely("executions-listed", "", lambda: executions_listed(self.deployment)))
        runs = [seen.run for seen in dropped]
        self.results.append(safely("audit-clean", "", lambda: audit_clean(runs, self._store, self.deployment)))
        self.results += list(implied(self.results, self.deployment))
        checked = {result.promise for result in self.results}
        why = "no run of this test can show it"
        self.results += [Result(NOT_CHECKED, name, "", why) for name in PROMISES if name not in checked]

    def report(self) -> str:
        """Return the report as Markdown for an issue."""
        counts = [sum(result.status == status for result in self.results) for status in (PASSED, FAILED, NOT_CHECKED)]
        spent = [None if seen.record is None else seen.record.cost(utc_now()) for seen in self.runs if seen.run]
        total = None if None in spent else sum(cost for cost in spent if cost is not None)
        lasted = duration((utc_now() - self.began).total_seconds())
        lines = [
            f"# dropforge smoke: {'failed' if self.has_failed else 'passed'}",
            f"{self.deployment.where}, {self.began:%Y-%m-%d %H:%M} UTC, {lasted}, dropforge {__version__}; "
            f"{usd(total)} of {usd(self.max_cost_usd)}, by the catalog's prices or yours; "
            f"{counts[0]} passed, {counts[1]} failed, {counts[2]} not checked",
            "",
            *(f"- {problem}" for problem in self.problems),
            *([""] if self.problems else []),
            "| | promise | run | observation |",
            "|---|---|---|---|",
            *(_row(result) for result in sorted(self.results, key=lambda result: result.status != FAILED)),
            "",
            f"To be checked by hand (docs/cloud-checklist.md): {', '.join(BY_HAND)}.",
        ]
        return "\n".join(lines) + "\n"


def _row(result: Result) -> str:
    message = result.message.replace("|", "\\|").replace("\n", " ")
    return f"| {result.status} | `{result.promise}` {PROMISES.get(result.promise, '')} | {result.target} | {message} |"


def _allowed_seconds(spec: JobSpec) -> int:
    """Return the seconds that a run's own limits allow until its endpoint is ready."""
    return seconds(spec.limits.max_duration) + (seconds(spec.serve.startup_timeout) if spec.serve else 0)


def _executions(deployment: Deployment, jobs: Iterable[str]) -> list[str]:
    """Return the full names of the executions of Cloud Run jobs."""
    return [
        execution.name for job in jobs for execution in deployment.clients.run_executions().list_executions(parent=job)
    ]


def _task_seconds(deployment: Deployment, job: str) -> float:
    """Return how long a task of a Cloud Run job may take, as Cloud Run has accepted it; 0 if the job is gone."""
    from google.api_core.exceptions import NotFound

    try:
        accepted = deployment.clients.run_jobs().get_job(name=job, timeout=TIMEOUT_SECONDS)
    except NotFound:
        return 0.0
    return float(accepted.template.template.timeout.total_seconds())


@contextmanager
def _interrupts(interrupted: threading.Event) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM only set the event, so that no upload and no cleanup stops half-way."""

    def set_event(number: int, frame: object) -> None:
        interrupted.set()

    before = {number: signal.signal(number, set_event) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
