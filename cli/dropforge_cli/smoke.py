"""`dropforge smoke`: the smallest real run on each target of a deployment, and what became of every promise.

It costs money in a real project, at most what --max-cost-usd says. However it goes, what it started is ended.
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
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.listing import Unlisted
from dropforge.platforms import get_target
from dropforge.platforms import targets as known_targets
from dropforge.run.record import RunState
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec, seconds

from .deployment import Deployment, connect
from .display import duration, stdout, table, titled, usd
from .follow import Follower
from .options import state_option
from .problems import FAILED as EXIT_FAILED
from .problems import INTERRUPTED
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
SPARE_SECONDS = 1800.0  # beyond a run's own limits, before it counts as lost
LOCAL_ENDING_SECONDS, CLOUD_ENDING_SECONDS = 60.0, 1200.0


def _by_target(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """TARGET=VALUE, any number of times."""
    given = {}
    for value in values:
        target, _, rest = value.partition("=")
        if target not in known_targets() or not rest:
            raise click.BadParameter(f"{value!r}; expected TARGET=…, with a target of {', '.join(known_targets())}")
        given[target] = rest
    return given


def _prices(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
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
@click.option("--max-cost-usd", type=click.FloatRange(0, min_open=True), required=True, help="What all of it may cost.")
@click.option(
    "--target", "targets", multiple=True, type=click.Choice(list(known_targets())), help="Default: all enabled."
)
@click.option("--price", "prices", multiple=True, metavar="TARGET=USD", callback=_prices, help="Per hour.")
@click.option("--place", "places", multiple=True, metavar="TARGET=PLACE", callback=_by_target, help="Region or zone.")
@click.option("--yes", is_flag=True, help="Do not ask before it starts.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the report to this file as well."
)
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
    """Train on each target of a deployment, check every promise, end everything; exit 1 if one was broken."""
    deployment = connect(state)
    runs = plan_runs(deployment.settings, Options(targets, prices, places), max_cost_usd)
    show_estimate(runs, deployment, max_cost_usd)
    if not yes:
        click.confirm("Start them?", abort=True)
    test = Smoke(deployment, runs, max_cost_usd)
    interrupted = test.run(stdout())
    text = test.report()
    click.echo(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if interrupted:
        raise SystemExit(INTERRUPTED)
    if test.has_failed:
        raise SystemExit(EXIT_FAILED)


def show_estimate(runs: list[Seen], deployment: Deployment, max_cost_usd: float) -> None:
    """What would be started, and what it may cost at most."""
    out, rows = stdout(), table("target", "where", "limit", "at most", right=("at most",))
    for one in runs:
        where = ", ".join(get_target(one.target).regions(one.spec))
        rows.add_row(one.label, where, one.spec.limits.max_duration, usd(one.limit_usd))
    out.print(titled("smoke", deployment.where))
    out.print(rows)
    out.print(f"at most {usd(sum(one.limit_usd for one in runs))} of {usd(max_cost_usd)}")


class Smoke:
    """One smoke test: `run` it, then read its `report`."""

    def __init__(self, deployment: Deployment, runs: list[Seen], max_cost_usd: float) -> None:
        self.deployment = deployment
        self.runs = runs
        self.max_cost_usd = max_cost_usd
        self.results: list[Result] = []
        self.problems: list[str] = []  # that belong to no promise
        self.began = utc_now()
        self._store: RunStore = deployment.store
        self._interrupted = threading.Event()
        self._followers: dict[str, Follower] = {}
        self._refused: dict[str, float] = {}  # since when no look at a run has come through

    @property
    def has_failed(self) -> bool:
        return bool(self.problems) or any(one.status == FAILED for one in self.results)

    def run(self, out: Console) -> bool:
        """Start, follow and end everything, and check it; whether somebody interrupted."""
        with _interrupts(self._interrupted):
            try:
                self._guarded(self._follow, out)
            finally:
                self._end(out)
        self._check()
        return self._interrupted.is_set()

    def _drop(self, out: Console) -> None:
        for one in self.runs:
            if self._interrupted.is_set():
                return
            data = one.spec.model_dump_json(by_alias=True, exclude_unset=True).encode()
            one.run = upload_spec(self.deployment, data, one.object_name)
            self._followers[one.run] = Follower(self._store, one.run)
            out.print(f"dropped {one.label}: {one.run}")

    def _follow(self, out: Console) -> None:
        """Drop the specs, and look until all runs are over, or must be by their own limits."""
        self._drop(out)
        began = time.monotonic()
        while any(not one.is_over for one in self.runs) and not self._interrupted.is_set():
            passed = time.monotonic() - began
            for one in self.runs:
                if one.record is None and passed > self.deployment.patience_seconds:
                    self.problems.append(f"{one.run} did not appear within {self.deployment.patience_seconds:.0f} s")
                    return
                self._try_to_look(one, out)
            if passed > max(_allowed_seconds(one.spec) for one in self.runs) + SPARE_SECONDS:
                self.problems.append("not all runs were over when their own limits had to have ended them")
                return
            self._interrupted.wait(self.deployment.look_seconds)

    def _try_to_look(self, one: Seen, out: Console) -> None:
        """One refused look costs nothing; refused for as long as a run may take to appear, it ends the test."""
        try:
            self._look(one, out)
        except refusals():
            since = self._refused.setdefault(one.run, time.monotonic())
            if time.monotonic() - since > self.deployment.patience_seconds:
                raise
        else:
            self._refused.pop(one.run, None)

    def _look(self, one: Seen, out: Console) -> None:
        if one.is_over or (snapshot := self._followers[one.run].look()) is None:
            return
        if one.record is None or one.record.state is not snapshot.record.state:
            passed = (utc_now() - self.began).total_seconds()
            out.print(f"{passed:7.1f} s  {one.label}: {snapshot.record.state.lower()}")
        one.record, one.ledger = snapshot.record, self._store.ledger(one.run)
        one.events |= {event.type: event for event in snapshot.events}
        if not one.is_over:
            self._look_at_training(one)
        elif one.record.endpoint is not None and one.record.endpoint.ended is None:
            one.answers = check_endpoint(one, one.record.endpoint, self.deployment)
            request_cancel(self.deployment, one.run)

    def _look_at_training(self, one: Seen) -> None:
        """See the resource that trains while it is there; have a run cancelled that is to be."""
        is_training = one.record is not None and one.record.state is RunState.TRAINING
        made = [entry for entry in one.ledger.remaining() if entry.created and not entry.is_endpoint(one.run)]
        if not made:
            return
        if one.cancels and not one.cancel_asked and is_training:
            request_cancel(self.deployment, one.run)
            one.cancel_asked = True
        if not one.training and not one.cancels:
            with suppress(Unlisted):  # of other places; what these list has been given before
                for found in get_target(one.target).listed(self.deployment.context.cloud):
                    one.training += [found] if found.run == one.run else []
            if one.target == "cloud_run":
                one.executions = _executions(self.deployment, [entry.name for entry in made])

    def _end(self, out: Console) -> None:
        """Ask for the end of what is not over, and wait until everything is seen to be gone."""
        if self._interrupted.is_set():
            out.print("interrupted: ending what was started")
        self._guarded(self._find_dropped)
        left = [one for one in self.runs if one.run and not self._guarded(self._is_gone, one)]
        patience = LOCAL_ENDING_SECONDS if self.deployment.stack else CLOUD_ENDING_SECONDS
        deadline = time.monotonic() + patience
        for one in left:
            out.print(f"ending {one.label}: {one.run}")
            self._guarded(request_cancel, self.deployment, one.run)
        while left and time.monotonic() < deadline:
            left = [one for one in left if not self._guarded(self._is_gone, one)]
            time.sleep(self.deployment.look_seconds if left else 0)
        self.problems += [f"{one.run} was not gone after {patience:.0f} s" for one in left]

    def _find_dropped(self) -> None:
        """Know the runs whose upload succeeded and was not answered."""
        bucket = self.deployment.clients.storage().bucket(self.deployment.settings.specs_bucket)
        for one in self.runs if self.problems else []:
            if not one.run and (blob := bucket.get_blob(one.object_name, timeout=TIMEOUT_SECONDS)) is not None:
                one.run = names.run_id_of_object(bucket.name, one.object_name, blob.generation)

    def _guarded(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """One refusal must not keep the other runs from being ended."""
        try:
            return act(*arguments)
        except refusals() as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            self.problems += [problem] if problem not in self.problems else []
            return None

    def _is_gone(self, one: Seen) -> bool:
        one.record, one.ledger = self._store.find(one.run), self._store.ledger(one.run)
        endpoint = one.record.endpoint if one.record else None
        return one.is_over and not one.ledger.remaining() and (endpoint is None or endpoint.ended is not None)

    def _check(self) -> None:
        dropped = [one for one in self.runs if one.run]
        for one in dropped:
            self.results += check_run(one, self._store, self.deployment)
        self.results.append(safely("executions-listed", "", lambda: executions_listed(self.deployment)))
        runs = [one.run for one in dropped]
        self.results.append(safely("audit-clean", "", lambda: audit_clean(runs, self._store, self.deployment)))
        self.results += list(implied(self.results, self.deployment))
        told = {one.promise for one in self.results}
        why = "no run that was made can show it"
        self.results += [Result(NOT_CHECKED, name, "", why) for name in PROMISES if name not in told]

    def report(self) -> str:
        """Markdown, to attach to an issue."""
        counts = [sum(one.status == status for one in self.results) for status in (PASSED, FAILED, NOT_CHECKED)]
        spent = [None if one.record is None else one.record.cost(utc_now()) for one in self.runs if one.run]
        total = None if None in spent else sum(cost for cost in spent if cost is not None)
        lasted = duration((utc_now() - self.began).total_seconds())
        lines = [
            f"# dropforge smoke: {'failed' if self.has_failed else 'passed'}",
            f"{self.deployment.where}, {self.began:%Y-%m-%d %H:%M} UTC, {lasted}, dropforge {__version__}; "
            f"{usd(total)} of {usd(self.max_cost_usd)}, by the catalogue's prices or yours; "
            f"{counts[0]} passed, {counts[1]} failed, {counts[2]} not checked",
            "",
            *(f"- {problem}" for problem in self.problems),
            *([""] if self.problems else []),
            "| | promise | run | what was seen |",
            "|---|---|---|---|",
            *(_row(one) for one in sorted(self.results, key=lambda one: one.status != FAILED)),
            "",
            f"Not checked, because it takes a person (docs/cloud-checklist.md): {', '.join(BY_HAND)}.",
        ]
        return "\n".join(lines) + "\n"


def _row(one: Result) -> str:
    found = one.message.replace("|", "\\|").replace("\n", " ")
    return f"| {one.status} | `{one.promise}` {PROMISES.get(one.promise, '')} | {one.target} | {found} |"


def _allowed_seconds(spec: JobSpec) -> int:
    """What a run's own limits leave it, until its endpoint is ready."""
    return seconds(spec.limits.max_duration) + (seconds(spec.serve.startup_timeout) if spec.serve else 0)


def _executions(deployment: Deployment, jobs: Iterable[str]) -> list[str]:
    """Of Cloud Run jobs, by full names."""
    return [one.name for job in jobs for one in deployment.clients.run_executions().list_executions(parent=job)]


@contextmanager
def _interrupts(interrupted: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set the event and nothing else: no upload and no ending may be left half-way."""

    def tell(number: int, frame: object) -> None:
        interrupted.set()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
