"""`dropforge init`: writes a valid job spec from the answers to four questions, or from options."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import click

from dropforge.base.errors import InvalidSpec
from dropforge.platforms import platform_of, targets
from dropforge.rows import LeftOut, Reader, UnsupportedRow, UnusableRow, form_of
from dropforge.rows.check import separator_of
from dropforge.rows.fields import JUDGES
from dropforge.rows.files import BadFile
from dropforge.rows.forms import judging_columns
from dropforge.rows.sources import is_read, rows_of
from dropforge.rows.split import MIN_TRAIN_ROWS
from dropforge.spec import Dataset, registry
from dropforge.spec.misnamed import FILE_SUFFIXES
from dropforge.spec.templates import is_column

from .deployment import Deployment, find
from .display import working
from .options import state_option
from .plain import echo, plain
from .policy import policy_in_use
from .problems import CliError
from .sources import local_paths, unreadable
from .specs import read_spec

FORMATS_HINT = "docs/data-formats.md shows each format"
HELD_OUT_SHARE, FEW_ROWS, FEW_ROWS_SHARE = 0.05, 40, 0.2
ANSWERS = ("completion", "answer", "response", "output", "reply", "label", "target", "summary", "translation", "sql")
NUMBERS = ("id", "idx", "index", "uuid", "row")  # columns that no prompt needs
# The tiny models of the local stack learn only with settings of their own (examples/local/).
TINY = "gs://local-data/tiny-"
# A tiny model is trained whole: with an adapter, 200 rows of an unknown language taught it nothing in 20 epochs.
TINY_TRAINING = {
    "adapter": {"type": "none"}, "learning_rate": 2e-3, "per_device_train_batch_size": 16, "max_length": 256,
}  # fmt: skip
TINY_SERVE = {"max_model_len": 256, "max_num_seqs": 8}
SERVES: dict[str, dict[str, Any]] = {"tpu_vm": {"type": "training_vm"}}
SERVE = {"type": "cloud_run", "region": "us-central1"}
BUDGET = "/limits/max_cost_usd"


class Data(NamedTuple):
    """The data set of a spec: its source, the rows of a local file (0 if unknown), and the templates it needs."""

    source: str
    rows: int = 0
    columns: dict[str, str] | None = None


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default="my-job.json")
@click.option("--target", type=click.Choice(list(registry.PLATFORMS)), help="Where to train.")
@click.option("--model", metavar="SOURCE", help="The base model: an id of the Hugging Face Hub, or gs://….")
@click.option("--data", metavar="SOURCE", help="A local file or folder, an id of the Hub, or gs://….")
@click.option("--answer", metavar="COLUMN", help="The column of a local file that has the answers to learn.")
@click.option("--serve/--no-serve", default=None, help="Whether to serve the trained model.")
@click.option("--bucket", metavar="BUCKET", help="Where a local file will be: `dropforge put` copies it there.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@state_option
def init(
    file: Path,
    target: str | None,
    model: str | None,
    data: str | None,
    answer: str | None,
    serve: bool | None,
    bucket: str | None,
    force: bool,
    state: str | None,
) -> None:
    """Write a valid job spec to FILE (my-job.json); asks for each value that no option gives."""
    if file.exists() and not force:
        raise CliError(f"{file} exists", "name another file, or `--force` replaces it")
    deployment = find(state)
    target = _asked("Where to train", target, "cloud_run", click.Choice(list(registry.PLATFORMS)))
    model = _asked("Base model", model, _usual_model(deployment, target))
    data = _asked("Data (a local file or folder, an id of the Hub, or gs://…)", data, _usual_data(deployment))
    if serve is None:
        serve = click.confirm("Serve the model", default=True, err=True) if sys.stdin.isatty() else True
    read = read_data(data, bucket or _usual_bucket(deployment), answer)
    document = _document(target, model, read, serve)
    _write(file, document, deployment)
    echo(str(file))
    if read.source != data:
        echo(f"next: dropforge put {shlex.quote(data)} {shlex.quote(read.source)}", err=True)
    echo(f"next: dropforge submit {shlex.quote(str(file))} --watch", err=True)


def _asked(question: str, given: str | None, default: str, kind: click.Choice[str] | None = None) -> str:
    """Return an option's value, else the answer in a terminal, else the default."""
    if given is not None or not sys.stdin.isatty():
        return given or default
    return str(click.prompt(plain(question), default=default, type=kind, err=True))


def _usual_model(deployment: Deployment | None, target: str) -> str:
    if deployment is None or deployment.stack is None:
        return "Qwen/Qwen3-0.6B"
    return f"{TINY}{'qwen3' if targets()[target].spec.trainer == 'maxtext' else 'gemma3'}"


def _usual_data(deployment: Deployment | None) -> str:
    is_local = deployment is not None and deployment.stack is not None
    return "gs://local-data/text-to-sql.jsonl" if is_local else "b-mc2/sql-create-context"


def _usual_bucket(deployment: Deployment | None) -> str:
    if deployment is None:
        return "my-data"
    if deployment.stack is not None:
        return "local-data"
    return deployment.settings.data_buckets.split(",")[0] or f"{deployment.settings.project}-data"


def read_data(source: str, bucket: str, answer: str | None = None) -> Data:
    """Return the data set. Local files are looked at; of another source only the examples' columns are known."""
    path = Path(source)
    if not source.startswith("gs://") and (path.suffix in FILE_SUFFIXES or path.exists()):
        return _read_file(path, bucket, answer)
    if source in ("b-mc2/sql-create-context", "gs://local-data/text-to-sql.jsonl"):
        return Data(source, 0, {"prompt": "Question: {question}\nContext: {context}", "completion": "{answer}"})
    return Data(source)


def _read_file(path: Path, bucket: str, answer: str | None) -> Data:
    """Look at a local file, or at the files of a folder."""
    try:
        paths = local_paths([str(path)])
    except BadFile as error:
        raise CliError(str(error), error.hint or FORMATS_HINT) from None
    uri, number, first = f"gs://{bucket}/{path.resolve().name}{'/' if path.is_dir() else ''}", 0, None
    if unread := next((each for each in paths if not is_read(each.name)), None):
        if answer:
            raise CliError(f"--answer {answer!r}: only the training reads {unread}", "write `dataset.columns` yourself")
        echo(f"note: only the training reads {unread}; `dataset.columns` names columns of your own", err=True)
        return Data(uri)
    for each in paths:
        rows_before = number
        try:
            with working(f"reading {each}"), closing(rows_of(each.open("rb"), each.name)) as rows:
                for row in rows:
                    first, number = first or row, number + 1
        except BadFile as error:
            raise CliError(f"{each}: {error}", error.hint or FORMATS_HINT) from None
        except OSError as error:
            raise unreadable(each, error) from None
        if number == rows_before and len(paths) > 1:
            raise CliError(f"{each} has no row of data", FORMATS_HINT)
    if first is None or number < MIN_TRAIN_ROWS:
        count = "no row" if first is None else "1 row" if number == 1 else f"{number} rows"
        raise CliError(f"{path} has {count} of data; expected at least {MIN_TRAIN_ROWS}", FORMATS_HINT)
    return Data(uri, number, columns_of(first, paths[0], answer))


def columns_of(row: Mapping[str, Any], path: Path, answer: str | None = None) -> dict[str, str] | None:
    """Return templates for the columns of a row; None if its form needs none. Raises CliError.

    The answer is the column that `answer` names, or whose name says so; in a terminal, the user is asked. No other
    column is taken for an answer: in a table of preferences, that could teach the rejected answers.
    """
    if answer is None:
        if judging := judging_columns(row) or [name for name in row if str(name).lower() in JUDGES]:
            message = f"{path} has the column {judging[0]!r}: not each of its answers is to be learnt"
            raise CliError(message, "keep the good answers only, or say which column has them: --answer COLUMN")
        if _needs_no_templates(row):
            return None
    if mark := separator_of([*row]):
        message = f"the columns of {path} are separated by {mark!r}; expected commas, or tabs in a .tsv"
        raise CliError(message, "save it again; docs/data-formats.md shows each format")
    names = [name for name in row if name is not None and name.lower() not in NUMBERS]
    if unfit := next((name for name in names if not is_column(name)), None):
        raise CliError(
            f"the column {unfit!r} of {path} cannot be in a template; expected no braces, brackets, : and !",
            "rename the column; docs/data-formats.md shows each format",
        )
    told = f"{path} has the columns {', '.join(names) or '(none)'}"
    if len(names) < 2:
        raise CliError(f"{told}; expected a question and an answer")
    by_name = {name.lower(): name for name in names}
    answer = answer or next((by_name[name] for name in ANSWERS if name in by_name), None)
    if answer is None and sys.stdin.isatty():
        answer = str(click.prompt("Column of the answers", type=click.Choice(names), err=True))
    if answer is None:
        raise CliError(f"{told}; no name says which has the answers", f"say it: --answer {shlex.quote(names[-1])}")
    if answer not in names:
        raise CliError(f"--answer names {answer!r}; {told}", "name one of the columns")
    asked = [name for name in names if name != answer]
    titled = [f"{name.replace('_', ' ').capitalize()}: {{{name}}}" for name in asked]
    return {"prompt": "\n".join(titled) if len(asked) > 1 else f"{{{asked[0]}}}", "completion": f"{{{answer}}}"}


def _needs_no_templates(row: Mapping[str, Any]) -> bool:
    """Whether the training reads a row as it is, with all of its columns. Raises CliError for rows that it refuses."""
    dataset = Dataset(source="gs://my-data/rows.jsonl")
    try:
        form = form_of(list(row), dataset)
    except UnsupportedRow:
        return False
    reader = Reader(form)
    try:
        reader(row)
    except (UnusableRow, LeftOut):  # another row may be better
        return True
    except UnsupportedRow as problem:
        if form.is_conversation:
            raise CliError(f"the data has {problem}", problem.hint) from None
        return False
    return form.is_conversation or not reader.unused


def _document(target: str, model: str, data: Data, serve: bool) -> dict[str, Any]:
    """Return the spec: the target of the platform's smallest real spec, with usual settings around it."""
    smallest = json.loads((files(registry.module_of(platform_of(target).name)) / "smoke.json").read_text("utf-8"))
    is_tiny = model.startswith(TINY)
    training = {"adapter": smallest["training"]["adapter"], "epochs": _epochs(data.rows, is_tiny)}
    share = FEW_ROWS_SHARE if 0 < data.rows < FEW_ROWS else HELD_OUT_SHARE
    return {
        "api_version": "dropforge/v1",
        "name": _name(data.source),
        "model": {"source": model},
        "dataset": {"source": data.source, **({"columns": data.columns} if data.columns else {})},
        "training": {**training, **(TINY_TRAINING if is_tiny else {})},
        "target": smallest["target"],
        "evaluation": {"holdout_fraction": share, "max_rows": 100},
        "serve": {**SERVES.get(target, SERVE), **(TINY_SERVE if is_tiny else {}), "ttl": "1h"} if serve else None,
        "limits": {"max_duration": "2h", "max_cost_usd": 10, "max_attempts": 3},
    }


def _epochs(rows: int, is_tiny: bool) -> int:
    """Return the number of epochs. Few rows are read more often, and a tiny model needs some thousand rows in all."""
    if not rows:
        return 1
    return min(20, max(1, 4000 // rows)) if is_tiny else 3 if rows < 1000 else 1


def _name(source: str) -> str:
    stem = re.sub("[^a-z0-9]+", "-", Path(source).stem.lower()).strip("-")
    return (stem if stem[:1].isalpha() else f"job-{stem}")[:40].strip("-")


def _write(file: Path, document: dict[str, Any], deployment: Deployment | None) -> None:
    """Write a spec that `validate` accepts. Raises CliError, and leaves no file, if it would not."""
    draft = file.with_name(f".{file.name}.draft")
    try:
        _save(draft, document)
        if problem := _problem(draft, deployment, BUDGET):
            document["limits"].pop("max_cost_usd")
            echo(f"note: the spec has no budget: {problem}", err=True)
            _save(draft, document)
        read_spec(draft.read_bytes(), policy_in_use(deployment))
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _problem(path: Path, deployment: Deployment | None, pointer: str) -> str:
    """Return the problem at a pointer of a spec; "" if there is none."""
    try:
        read_spec(path.read_bytes(), policy_in_use(deployment))
    except InvalidSpec as error:
        found = (problem for problem in error.problems if problem.pointer == pointer)
        return next((f"{problem.message} ({problem.expected})" for problem in found), "")
    return ""


def _save(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
