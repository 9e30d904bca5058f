"""`dropforge data`: look at training data before a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from dropforge.base.changes import evolve
from dropforge.base.figures import duration, usd
from dropforge.fit.batch import batch_of
from dropforge.money.plan import make_plan
from dropforge.rows.check import CHARACTERS_PER_TOKEN, Finding, Report, check
from dropforge.rows.files import BadFile, Raw, json_row, text_of_file, text_rows
from dropforge.rows.sources import ARROW, TEXT, files_of, format_of, is_glob, is_read, rows_of
from dropforge.rows.split import evaluation_dataset, shuffled
from dropforge.rows.tables import table_lines, unpacked
from dropforge.spec import MAX_SPEC_BYTES, Dataset, Evaluation, JobSpec, parse_spec
from dropforge.spec.misnamed import FILE_SUFFIXES
from dropforge.spec.sections import Model, Training
from dropforge.stages.ceiling import with_defaults

from .data_tokens import Tokens, tokens_of, trainer, why_no_model
from .deployment import connect, find, placeholders
from .display import stdout, table, titled, working
from .options import json_option, state_option
from .plain import echo_json
from .policy import policy_in_use
from .problems import FAILED, CliError
from .sources import local_paths

MODEL_ROWS = 50_000  # rows whose token ids are made; they are drawn at random
BAR = 40
STYLES = {"refused": "red", "fault": "yellow", "note": "dim"}
LEARNT = ("\u27e6", "\u27e7")  # around what the model learns


@dataclass(frozen=True)
class Wanted:
    """What is checked: the parts of a spec, or their defaults for a data set alone."""

    dataset: Dataset
    evaluation: Evaluation | None
    training: Training
    model: Model | None
    spec: JobSpec | None = None


@dataclass(frozen=True)
class Run:
    """What a run of the spec takes: tokens of all epochs, and the time and money that its limits allow."""

    tokens: int
    steps: int
    seconds: int
    usd_per_hour: float | None
    worst_case_usd: float | None
    least_tokens_per_second: float


@click.group()
def data() -> None:
    """Check training data before a run: forms, columns, faults of rows, lengths."""


@data.command("check")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...|SPEC")
@click.option(
    "--model",
    "directory",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="The base model's files, for token ids; default: model.source, if it is a directory.",
)
@click.option("--show", type=click.IntRange(0), default=3, metavar="N", help="Rows shown as the model sees them (3).")
@json_option
@state_option
def check_data(sources: tuple[str, ...], directory: str | None, show: int, as_json: bool, state: str | None) -> None:
    """Check files, folders, globs, gs:// URIs, a data set of the Hub, or all data of a spec; exit 1 for faults."""
    wanted = _wanted(sources, directory, state)
    with TemporaryDirectory() as temporary:
        open_rows = _opener(Path(temporary), state)
        other = evaluation_dataset(wanted.dataset, wanted.evaluation)
        with working(f"reading {wanted.dataset.title}"):
            report = check(
                wanted.dataset,
                open_rows(wanted.dataset),
                wanted.evaluation,
                wanted.training.seed,
                (other, open_rows(other)) if other else None,
            )
        tokens, why = _tokens(wanted, report, other, open_rows, show)
    if tokens and tokens.findings:
        report = replace(report, findings=(*report.findings, *tokens.findings))
    run = _run(wanted.spec, report, tokens, state) if wanted.spec else None
    if as_json:
        echo_json(_to_json(report, tokens, run, why))
    else:
        _show(report, tokens, run, why, wanted.training.max_length)
    if report.is_faulty:
        raise SystemExit(FAILED)


def _wanted(sources: tuple[str, ...], directory: str | None, state: str | None) -> Wanted:
    source = sources[0]
    spec = _spec(Path(source), state) if len(sources) == 1 else None
    if spec is None:
        # Also local paths, which no spec may name.
        dataset = evolve(Dataset(source="owner/name"), source=[*sources] if sources[1:] else source)
        model = evolve(Model(source="owner/name"), source=directory) if directory else None
        return Wanted(dataset, Evaluation(), Training(), model)
    if not isinstance(spec.dataset, Dataset):
        raise CliError(f"{source} trains on random tokens; there are no rows to check", "name a spec with a data set")
    place = directory or (spec.model.source if Path(spec.model.source).is_dir() else None)
    model = evolve(spec.model, source=place) if place else None
    return Wanted(spec.dataset, spec.evaluation, spec.training, model, spec)


def _spec(path: Path, state: str | None) -> JobSpec | None:
    """The job spec of a file; None for anything else, such as a file of rows. Raises InvalidSpec."""
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size > MAX_SPEC_BYTES:
        return None
    text = path.read_bytes()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or "api_version" not in document:
        return None
    return with_defaults(parse_spec(text), policy_in_use(find(state)))


def _opener(temporary: Path, state: str | None) -> Callable[[Dataset], Iterable[Raw]]:
    """How to read the rows of a data set, from their beginning at each call."""

    def rows(dataset: Dataset) -> Iterable[Raw]:
        sources = dataset.sources
        if all(source.startswith("gs://") for source in sources):
            return _objects(dataset, connect(state).clients.storage(), temporary)
        if sources[1:] or Path(sources[0]).exists() or is_glob(sources[0]) or Path(sources[0]).suffix in FILE_SUFFIXES:
            return _local(sources)
        return _as_trained(dataset, None, temporary)

    return rows


def _local(sources: list[str]) -> Iterator[Raw]:
    yield from _joined([(str(path), _file_rows(path)) for path in local_paths(sources)])


def _objects(dataset: Dataset, client: Any, temporary: Path) -> Iterator[Raw]:
    files = files_of(client, dataset.sources)
    if not all(is_read(file.uri) for file in files):
        yield from _as_trained(dataset, client, temporary)
        return
    yield from _joined([(file.uri, rows_of(file.blob.open("rb"), file.uri)) for file in files])


def _as_trained(dataset: Dataset, client: Any, temporary: Path) -> Iterable[Raw]:
    """The rows by the trainer's own code, in a directory of their own: it makes files of them."""
    if reason := why_no_model():
        raise CliError(f"{dataset.title} is not read here: {reason}", f"name files that end in {', '.join(TEXT)}")
    loaded: Iterable[Raw] = trainer()[0].load_rows(dataset, client, Path(mkdtemp(dir=temporary)))[0]
    return loaded


def _joined(files: Sequence[tuple[str, Iterable[Raw]]]) -> Iterator[Raw]:
    """The rows of files with their names. Raises BadFile, which names the file if there are several."""
    for name, rows in files:
        try:
            yield from rows
        except BadFile as problem:
            raise BadFile(f"{name}: {problem}" if files[1:] else str(problem), problem.hint) from None


def _file_rows(path: Path) -> Iterator[Raw]:
    """The rows of a local file. Raises BadFile, and CliError if only PyArrow could read it."""
    if is_read(path.name):
        yield from rows_of(path.open("rb"), path.name)
        return
    suffix, compression = format_of(path.name)
    try:
        if suffix in ARROW:
            for line in table_lines(path, suffix):
                yield json_row(line, "")
            return
        with unpacked(path, compression) as data, text_of_file(data, suffix) as text:
            yield from text_rows(text, suffix)
    except ImportError:
        raise CliError(f"{path} is not read here: pyarrow is not installed", "pip install 'dropforge[train]'") from None


class _Chosen(Sequence[Raw]):
    """The rows of a data set that are drawn, by their numbers: the others are not in memory."""

    def __init__(self, rows: Iterable[Raw], count: int, chosen: frozenset[int]) -> None:
        self._count = count
        self._rows = {number: row for number, row in enumerate(rows) if number in chosen}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def _tokens(
    wanted: Wanted,
    report: Report,
    other: Dataset | None,
    open_rows: Callable[[Dataset], Iterable[Raw]],
    show: int,
) -> tuple[Tokens | None, str]:
    """The token ids of the rows, or why there are none."""
    if wanted.model is None:
        return None, "no model at hand: name its directory with --model DIR"
    if reason := why_no_model():
        return None, reason
    if report.is_refused:
        return None, "the training would refuse the rows"
    rows, most, seed = report.scan.rows, min(wanted.dataset.limit or MODEL_ROWS, MODEL_ROWS), wanted.training.seed
    limited = evolve(wanted.dataset, limit=most)
    with working("making token ids"):
        raw = _Chosen(open_rows(wanted.dataset), rows, frozenset(shuffled(rows, seed)[:most]))
        judged = ([*open_rows(other)], other) if other else None
        return tokens_of(raw, judged, limited, wanted.evaluation, wanted.training, wanted.model, show), ""


def _run(spec: JobSpec, report: Report, tokens: Tokens | None, state: str | None) -> Run | None:
    """What a run takes, by the token ids or else by the characters of the rows."""
    if not report.train or (tokens and not tokens.tokens):
        return None
    batch, training = batch_of(spec), spec.training
    if tokens:
        scale = report.train / tokens.rows
        count, sequences = tokens.tokens * scale, len(tokens.lengths) * scale
    else:
        share = report.train / report.scan.usable
        count, sequences = report.scan.characters / CHARACTERS_PER_TOKEN * share, float(report.train)
    if batch.unit == "blocks":
        sequences = count / training.max_length
    steps = math.ceil(math.ceil(sequences / batch.sequences) * training.epochs)
    total = count * training.epochs
    if training.max_steps:
        steps, total = training.max_steps, total * training.max_steps / steps
    deployment = find(state)
    plan = make_plan(spec, deployment.settings if deployment else placeholders(), "spec.json")
    first = plan.placements[0]
    allowed = first.timeout_seconds
    return Run(round(total), steps, allowed, first.price.usd_per_hour, plan.worst_case_usd, round(total / allowed, 1))


def _to_json(report: Report, tokens: Tokens | None, run: Run | None, why: str) -> dict[str, Any]:
    scan = report.scan
    return {
        "ok": not report.is_faulty,
        "source": scan.source,
        "form": scan.form,
        "columns": scan.columns,
        "rows": scan.rows,
        "usable": scan.usable,
        "unusable": scan.unusable,
        "left_out": scan.left_out,
        "train": report.train,
        "held_out": report.held_out,
        "answers_given": scan.answers,
        "characters": scan.characters,
        "learnt_characters": scan.learnt_characters,
        "findings": [each._asdict() for each in _sorted(report.findings)],
        "tokens": {**asdict(tokens), "lengths": _histogram(tokens.lengths), "findings": None} if tokens else None,
        "estimated_lengths": None if tokens else _histogram(_estimated(report)),
        "no_tokens_because": why,
        "run": asdict(run) if run else None,
    }


def _show(report: Report, tokens: Tokens | None, run: Run | None, why: str, max_length: int) -> None:
    out, scan = stdout(), report.scan
    out.print(titled(scan.source, f"{scan.rows:,} rows, form {scan.form or 'unknown'}"), soft_wrap=True)
    if scan.columns:
        out.print(f"columns: {', '.join(f'{name} ({found})' for name, found in scan.columns.items())}", soft_wrap=True)
    told = f"{scan.usable:,} usable rows with {scan.answers:,} answers"
    out.print(f"{told}; {scan.unusable:,} unusable, {scan.left_out:,} left out by their weight")
    if report.train:
        out.print(f"{report.train:,} rows to train on, {report.held_out:,} held out")
    if tokens and tokens.lengths:
        _show_tokens(tokens, max_length, out)
    elif scan.usable:
        out.print(f"lengths in tokens, estimated as {CHARACTERS_PER_TOKEN} characters each: {why}", soft_wrap=True)
        _show_lengths(_estimated(report), max_length, out)
    if run:
        _show_run(run, is_estimated=tokens is None, out=out)
    for row in tokens.shown if tokens else ():
        out.print(titled(f"row {row.row}", f"learnt: {LEARNT[0]}text{LEARNT[1]}"))
        for part in row.parts:
            text = f"{LEARNT[0]}{part.text}{LEARNT[1]}" if part.is_learnt else part.text
            out.print(Text(text, "bold" if part.is_learnt else ""), end="", soft_wrap=True)
        out.print()
    for found in _sorted(report.findings):
        out.print(Text(f"{found.level}: {found}", STYLES[found.level]), soft_wrap=True)
        out.print(f"  fix: {found.fix}", soft_wrap=True)
    counts = {level: sum(each.level == level for each in report.findings) for level in STYLES}
    out.print(", ".join(f"{count} {level}" for level, count in counts.items() if count) or "no fault found")


def _show_tokens(tokens: Tokens, max_length: int, out: Console) -> None:
    out.print("lengths in tokens, by the model's tokenizer and chat template:")
    _show_lengths(tokens.lengths, max_length, out)
    if tokens.tokens:
        share = tokens.learnt / tokens.tokens
        out.print(f"{tokens.tokens:,} tokens in {tokens.rows:,} rows; {tokens.learnt:,} are learnt ({share:.0%})")
        cut = f"{tokens.cut:,} sequences are cut at training.max_length {max_length}, {tokens.dropped:,} rows dropped"
        out.print(f"{tokens.answers_learnt:,} of {tokens.answers_given:,} answers are learnt whole; {cut}")


def _show_lengths(lengths: Iterable[int], max_length: int, out: Console) -> None:
    found = _histogram(lengths)
    rows, most = table("at most", "rows", "", right=("at most", "rows")), max(found.values(), default=1)
    for bound, count in found.items():
        mark = " cut" if bound > max_length else ""
        rows.add_row(f"{bound:,}", f"{count:,}", f"{'#' * math.ceil(count / most * BAR)}{mark}")
    out.print(rows)


def _histogram(lengths: Iterable[int]) -> dict[int, int]:
    """How many lengths are at most each power of 2, and above half of it."""
    counts: dict[int, int] = {}
    for length in lengths:
        bound = 1 << max(length - 1, 0).bit_length()
        counts[bound] = counts.get(bound, 0) + 1
    return dict(sorted(counts.items()))


def _estimated(report: Report) -> Iterator[int]:
    return (math.ceil(length / CHARACTERS_PER_TOKEN) for length in report.scan.lengths if length)


def _show_run(run: Run, *, is_estimated: bool, out: Console) -> None:
    about = "about " if is_estimated else ""
    price = f"{usd(run.usd_per_hour)} per hour, {usd(run.worst_case_usd)} with the endpoint in the worst case"
    out.print(f"the run: {about}{run.tokens:,} tokens in {about}{run.steps:,} steps; {price}", soft_wrap=True)
    speed = f"{run.least_tokens_per_second:,} tokens/s"
    out.print(f"its limits allow {duration(run.seconds)} of training: at least {speed} are needed", soft_wrap=True)


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: list(STYLES).index(each.level))
