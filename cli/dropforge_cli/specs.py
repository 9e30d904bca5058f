"""`dropforge validate` and `dropforge submit`: check a job spec on this machine, and drop it."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import click

from dropforge.base import names
from dropforge.base.errors import Conflict, InvalidSpec
from dropforge.cloud.clients import TIMEOUT_SECONDS, Clients
from dropforge.cloud.objects import write_once
from dropforge.fit.configuration import NoConfiguration, find_shape, read_shape
from dropforge.fit.shape import ModelShape
from dropforge.money.limits import short_endpoint
from dropforge.rows.check import Report
from dropforge.rows.sample import problems_of, samples_of
from dropforge.spec import JobSpec, parse_spec
from dropforge.spec.advice import advice
from dropforge.spec.policy import Policy
from dropforge.stages.admission import rule_problems
from dropforge.stages.ceiling import with_defaults

from .deployment import Deployment, connect, find
from .display import stdout, working
from .duplicates import refuse_duplicate
from .follow import watch
from .options import SPEC_FILE, STDIN, json_option, model_config_option, spec_bytes, state_option
from .plain import echo, echo_json
from .policy import policy_in_use, refusal
from .problems import FAILED, CliError
from .sources import local_files, prepare


@click.command()
@click.argument("specs", nargs=-1, required=True, type=SPEC_FILE, metavar="SPEC...")
@json_option
@model_config_option
def validate(specs: tuple[Path, ...], as_json: bool, model_config: Path | None) -> None:
    """Check job specs without dropping them.

    With a local stack, also the columns of the data; in a project, `preflight` reads them.
    """
    deployment = find(None)
    policy = policy_in_use(deployment)
    told: list[dict[str, Any]] = []
    for path in specs:
        try:
            spec = read_spec(spec_bytes(path), policy, model_config)
            if deployment is not None and deployment.stack is not None:
                good_samples(spec, deployment)
        except InvalidSpec as error:
            told.append({**refusal(path, error.problems), "notes": []})
            lines = [str(problem) for problem in error.problems]
        else:
            told.append({**refusal(path, []), "notes": _notes(spec)})
            lines = [f"ok, {spec.name}"]
            _note(path, spec)
        for line in [] if as_json else lines:
            echo(f"{path}: {line}")
    if as_json:
        echo_json(told)
    if not all(each["ok"] for each in told):
        raise SystemExit(FAILED)


@click.command()
@click.argument("spec", type=SPEC_FILE)
@click.option("--name", "object_name", metavar="OBJECT", help="Object name below specs/; default: the file name.")
@click.option("--unchecked", is_flag=True, help="Drop the spec even if it is invalid.")
@click.option("--again", is_flag=True, help="Do not ask when a run had the same spec.")
@click.option("--watch", "watched", is_flag=True, help="Follow the run to its end; exit 1 unless it succeeds.")
@state_option
def submit(spec: Path, object_name: str | None, unchecked: bool, again: bool, watched: bool, state: str | None) -> None:
    """Drop a job spec into the specs bucket; prints the run's id."""
    deployment, data = connect(state), spec_bytes(spec)
    again = again or refuse_duplicate(deployment, data)
    if not unchecked:
        job = read_spec(data, policy_in_use(deployment))
        _note(spec, job)
        for report in good_samples(job, deployment):
            echo(f"{spec}: data: {report.verdict}", err=True)
        prepare(job, deployment)
    with working("dropping the spec"):
        run = upload_spec(deployment, data, object_name or _object_name(spec, data), again=again)
    echo(run)
    echo(f"dropped into {deployment.where}", err=True)
    if watched and not watch(deployment, run, stdout()):
        raise SystemExit(FAILED)


def _object_name(path: Path, data: bytes) -> str:
    """Return the name of the object that a spec becomes: its file's, or its own if it comes from the standard input."""
    if path != STDIN:
        return path.name
    try:
        return f"{parse_spec(data).name}.json"
    except InvalidSpec:  # --unchecked
        return "stdin.json"


def good_samples(spec: JobSpec, deployment: Deployment) -> list[Report]:
    """The checks of the first rows of the spec's data. Raises InvalidSpec for what the training would refuse."""
    with working("reading the first rows of the data"):
        reports = samples_of(spec, deployment.clients)
    if problems := problems_of(reports):
        raise InvalidSpec(problems)
    return reports


def read_spec(data: bytes, policy: Policy, model_config: Path | None = None, clients: Clients | None = None) -> JobSpec:
    """Read a spec with the policy's defaults, and apply every rule that needs no cloud. Raises InvalidSpec.

    `shape_here` explains the other arguments.
    """
    spec = with_defaults(parse_spec(data), policy)
    shape = shape_here(spec, model_config, clients)
    problems = rule_problems(spec, policy, shape if isinstance(shape, ModelShape) else None)
    if problems := [*problems, *local_files(spec)]:
        raise InvalidSpec(problems)
    return spec


def shape_here(spec: JobSpec, model_config: Path | None = None, clients: Clients | None = None) -> ModelShape | str:
    """The shape of the spec's model, or why it is not known here. `model_config` is a config.json or its directory.

    Without `clients`, a bucket is not read, and only a public model's configuration is fetched from the Hub.
    """
    try:
        if model_config is None:
            in_bucket = spec.model.source.startswith("gs://")
            with working("reading the model's configuration"):
                return find_shape(spec.model, clients or (None if in_bucket else Clients()))
        path = model_config / "config.json" if model_config.is_dir() else model_config
        return read_shape(json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError) as error:
        raise CliError(f"--model-config {model_config} cannot be read: {error}", "name a config.json") from None
    except NoConfiguration as error:
        return str(error)


def _note(path: Path, spec: JobSpec) -> None:
    """Print what is doubtful about the spec. It goes to stderr, because programs read stdout."""
    for note in _notes(spec):
        echo(f"{path}: note: {note}", err=True)


def _notes(spec: JobSpec) -> list[str]:
    return [note for note in (short_endpoint(spec), *advice(spec)) if note]


def upload_spec(deployment: Deployment, data: bytes, object_name: str, *, again: bool = False) -> str:
    """Drop a spec with the ordinary storage client; return the run's id. Raises CliError.

    Without `again`, a spec that the object has already joins its run (docs/cli.md#the-same-spec-again).
    """
    name = object_name if object_name.startswith(names.SPECS_PREFIX) else names.SPECS_PREFIX + object_name
    if not names.is_spec_object(name):
        raise CliError(f"the object name is {name!r}; only specs/….json starts a run", "choose another --name")
    bucket = deployment.clients.storage().bucket(deployment.settings.specs_bucket)
    present = bucket.get_blob(name, timeout=TIMEOUT_SECONDS)
    blob = bucket.blob(name)
    if again:
        blob.metadata = {names.AGAIN: uuid.uuid4().hex}
    try:
        write_once(blob, data, present.generation if present else 0)
    except Conflict as conflict:
        raise CliError(str(conflict), "submit again, or choose another --name") from None
    return names.run_id_of_object(deployment.settings.specs_bucket, name, blob.generation)
