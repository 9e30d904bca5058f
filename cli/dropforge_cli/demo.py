"""`dropforge demo`: takes one job spec from the bucket to a served answer on this machine, and leaves nothing."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from dropforge.base.figures import duration
from dropforge.run.record import Record, RunState
from dropforge.spec import JobSpec

from . import INTERRUPTED, demo_again, report
from .console import console_link
from .deployment import Deployment, of_stack
from .display import stdout, titled
from .follow import show_until_terminal
from .machine import check_machine
from .options import FILE
from .policy import policy_in_use
from .problems import FAILED, CliError, explained
from .runs import request_cancel
from .sources import SOURCES, make_secrets, upload_source
from .specs import read_spec, upload_spec

ENDING_SECONDS = 60.0
POLL_SECONDS = 0.1
ENGINES = ("transformers", "vllm")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@click.command()
@click.argument("spec", type=FILE, default="examples/local/cloud_run.json")
@click.option(
    "--serve",
    "engine",
    type=click.Choice(ENGINES),
    default=ENGINES[0],
    show_default=True,
    help="The engine that serves: `transformers serve`, or vLLM's CPU build in build/vllm.",
)
@click.option(
    "--again",
    is_flag=True,
    help="Two specs, one URL: a model with little training serves, then a better one behind the same URL, then a "
    "rollback.",
)
@click.option(
    "--state", metavar="DIR", default="build/demo", show_default=True, help="Directory of the demo's own stack."
)
def demo(spec: Path, engine: str, again: bool, state: str) -> None:
    """Train and serve a small model on this machine, then end everything it started."""
    directory, job = Path(state).resolve(), read_spec(spec.read_bytes(), policy_in_use(None))
    if again:
        demo_again.check_names(job)
    with _alone(directory):
        raise SystemExit(run_demo(job, spec, engine, directory, stdout(), again=again))


def run_demo(spec: JobSpec, path: Path, engine: str, state: Path, out: Console, *, again: bool = False) -> int:
    """Run a demo of `spec` and return its exit code. In every case, end everything it started."""
    began = time.monotonic()
    code = FAILED
    try:
        code = _try_demo(spec, path, engine, state, out, again=again)
    finally:
        for number in SIGNALS:  # a second Ctrl-C must not interrupt the cleanup
            signal.signal(number, signal.SIG_IGN)
        nothing_left = _end(state, out, interrupted=code == INTERRUPTED)
    out.print(f"{'done' if code == 0 else 'ended'} after {duration(time.monotonic() - began)}")
    return code or (0 if nothing_left else FAILED)


def _try_demo(spec: JobSpec, path: Path, engine: str, state: Path, out: Console, *, again: bool) -> int:
    try:
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)
        with explained():
            return 0 if _demonstrate(spec, path, engine, state, out, again=again) else FAILED
    except CliError as error:
        error.show()
        return FAILED
    except KeyboardInterrupt:
        out.print("interrupted")
        return INTERRUPTED


def _demonstrate(spec: JobSpec, path: Path, engine: str, state: Path, out: Console, *, again: bool) -> bool:
    """Run the demo and print its report; return whether its runs succeeded."""
    check_machine(spec)
    for purpose in (f"training on {spec.target.type}", f"serving by {engine}"):
        if tool := ENVIRONMENTS.get(purpose):
            _step(out, f"prepared the environment for {purpose}", partial(make_environment, tool))
    deployment = _start(state, engine, out)
    _step(out, "created the secrets that the spec names", lambda: make_secrets(spec, deployment))
    for uri in spec.sources.values():
        if uri in SOURCES:
            _step(out, f"uploaded {uri} to the emulated bucket", lambda uri=uri: upload_source(deployment.clients, uri))  # type: ignore[misc]
    if again:
        return demo_again.demonstrate(deployment, spec, path, out)
    run = upload_spec(deployment, path.read_bytes(), path.name, again=True)
    out.print(f"dropped {path} into gs://{deployment.settings.specs_bucket}/specs/")
    if deployment.stack and deployment.stack.console:
        out.print(f"watch it: {console_link(state, deployment.stack, f'/runs/{run}')}", soft_wrap=True)
    out.print()
    record = show_until_terminal(deployment, run, out)
    if record.state is not RunState.SUCCEEDED:
        report.show_failure(deployment, deployment.store, record, out)
        return False
    report.show_metrics(record, out)
    report.show_parity(record, out)
    if record.endpoint is not None:
        report.show_answer(deployment, record, record.endpoint, out)
        record = end_endpoint(deployment, record)
    report.show_stages(record, out)
    report.show_cost(record, spec, out)
    report.show_slack(deployment, out)
    return True


def _start(state: Path, engine: str, out: Console) -> Deployment:
    """Start a new stack, after ending the leftovers of a killed demo."""
    from dropforge_local.stack import control as stack
    from dropforge_local.stack.config import StackConfig

    for name in stack.down(state, delete=True):
        out.print(f"ended {name}, left by an earlier demo")
    StackConfig(bases=["vllm"] if engine == "vllm" else []).save(state)
    began = time.monotonic()
    with out.status("starting the local stack"):
        deployment = of_stack(stack.up(state))
    out.print(f"started the local stack in {duration(time.monotonic() - began)}: {deployment.where}")
    return deployment


def _step(out: Console, title: str, work: Callable[[], object]) -> None:
    began = time.monotonic()
    with out.status(title):  # visible on a terminal only, while the work lasts
        work()
    out.print(f"{title} ({duration(time.monotonic() - began)})")


def make_environment(tool: str) -> None:
    """Run the tool that creates an environment if it is missing. The tool prints its progress. Raises CliError."""
    from dropforge_local.stack.config import ROOT

    done = subprocess.run([sys.executable, "-P", str(ROOT / "tools" / tool)], stdout=subprocess.DEVNULL)
    if done.returncode:
        message = f"the environment could not be created: tools/{tool} exited with {done.returncode}"
        raise CliError(message, "fix the problem printed above, or choose a spec or an engine without that environment")


# The tools that create an environment for images with other packages than the stack's.
ENVIRONMENTS = {
    "training on ray": "maxtext_env.py",
    "training on tpu_vm": "maxtext_env.py",
    "serving by vllm": "vllm_env.py",
}


def end_endpoint(deployment: Deployment, record: Record) -> Record:
    """End a finished run's endpoint by the ordinary request; return the record once it is gone. Raises CliError."""
    request_cancel(deployment, record.run)
    store, deadline = deployment.store, time.monotonic() + ENDING_SECONDS
    while time.monotonic() < deadline:
        record = store.record(record.run)
        if record.endpoint is None or record.endpoint.ended:
            return record
        time.sleep(POLL_SECONDS)
    raise CliError(f"the endpoint of {record.run} still exists after {ENDING_SECONDS:.0f} s")


def _end(state: Path, out: Console, *, interrupted: bool) -> bool:
    """End the stack, print what is left, and return whether nothing is left.

    After an interruption the emulated cloud is deleted with its resources; otherwise it must already be empty.
    """
    from dropforge_local.stack import control as stack

    with out.status("ending everything"):
        stack.down(state)
    left = stack.leftovers(state)
    if interrupted:
        stack.down(state, delete=True)
        left = stack.Leftovers([], left.processes, left.ports)
    out.print()
    counts = f"{len(left.resources)} resources, {len(left.processes)} processes, {len(left.ports)} ports"
    out.print(titled("what is left", counts))
    for name in [*left.resources, *map(str, left.processes), *map(str, left.ports)]:
        out.print(f"  {name}", style="red")
    if not interrupted:
        out.print(f"files and logs of the run are in {state}", style="dim")
    return not left


@contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Lock the state directory for one demo. Raises CliError."""
    state.parent.mkdir(parents=True, exist_ok=True)
    with (state.parent / f"{state.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(f"another demo runs in {state}", "wait until it ends, or choose another --state") from None
        yield
