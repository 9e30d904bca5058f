"""The check of a data set without a model: what the training would refuse, leave out, or learn wrongly.

Messages have the number of a row, the kind of the fault and the correction, and never a text of a row. Rows are read
one after another. What is kept of each takes 36 bytes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain, islice, pairwise
from typing import Literal, NamedTuple

from dropforge.base.errors import SpecProblem
from dropforge.spec import Dataset, Evaluation
from dropforge.spec.parts import shown
from dropforge.spec.templates import columns_in, shown_columns

from .conversation import LeftOut, Row
from .damage import damage_of
from .files import BadFile, Raw
from .forms import FORMS, Form, Reader, columns_of, form_of, has_column
from .split import MAX_BAD_ROWS, MIN_TRAIN_ROWS, held_out_count, rows_to_hold_out_one, shuffled
from .values import UnsupportedRow, UnusableRow, is_empty

# refused: the run would end. fault: the training learns or measures something wrong. note: worth knowing.
Level = Literal["refused", "fault", "note"]
SOURCE = "/dataset/source"
OTHER_SEPARATORS = (";", "\t", "|", ",")
PEEK_ROWS = 10_000  # all of their columns decide the form
FEW_ROWS = 20  # fewer unusable rows say nothing about the others
MOST_UNUSABLE = 0.5  # of a sample; the training leaves out at most a tenth of all rows
MAX_KINDS = 100  # of faults of rows; others count as one
CHARACTERS_PER_TOKEN = 4  # a rule of thumb for English: https://platform.openai.com/tokenizer
UNUSABLE = "not usable: "
GOOD_FILE = "a file as docs/data-formats.md shows"


class Finding(NamedTuple):
    """One result: what is wrong and how to correct it. `rows` rows have it, `row` is the first (from 0)."""

    level: Level
    message: str
    fix: str
    rows: int = 0
    row: int | None = None
    pointer: str = SOURCE
    found: str | None = None

    def __str__(self) -> str:
        if self.row is None:
            return self.message
        return f"{self.rows} row{'' if self.rows == 1 else 's'}: {self.message} (the first: row {self.row})"


class _Digests:
    """The 64-bit hash of a text of each row; 0 for a row that is not used."""

    def __init__(self) -> None:
        self.exact = array("q")
        self.near = array("q")  # after normalising case and white space

    def add(self, text: str | None) -> None:
        self.exact.append(0 if text is None else hash(text) or 1)
        self.near.append(0 if text is None else hash(" ".join(text.casefold().split())) or 1)


@dataclass
class Scan:
    """What one pass over the rows of a data set finds."""

    dataset: Dataset
    source: str
    is_whole: bool = True
    pointer: str = SOURCE
    form: str = ""
    columns: dict[str, str] = field(default_factory=dict)  # by first sight, with their verdicts
    rows: int = 0
    usable: int = 0
    left_out: int = 0
    unusable: int = 0
    answers: int = 0
    characters: int = 0
    learnt_characters: int = 0
    findings: list[Finding] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    lengths: array[int] = field(default_factory=lambda: array("I"))  # characters of each row
    questions: _Digests = field(default_factory=_Digests)
    contents: _Digests = field(default_factory=_Digests)
    kinds: dict[str, Finding] = field(default_factory=dict)

    def add(self, level: Level, message: str, fix: str, row: int) -> None:
        """Count a fault of a row by its kind: messages that differ in their numbers only are of one kind."""
        key = f"{level} {re.sub('[0-9]+', '0', message)}"
        if key not in self.kinds and len(self.kinds) >= MAX_KINDS:
            key, message = f"{level} others", "other faults"
        known = self.kinds.get(key) or Finding(level, message, fix, 0, row, self.pointer)
        self.kinds[key] = known._replace(rows=known.rows + 1)

    def refuse(self, message: str, fix: str, pointer: str = "", found: str | None = None) -> None:
        self.findings.append(Finding("refused", message, fix, pointer=pointer or self.pointer, found=found))


@dataclass(frozen=True)
class Report:
    """The result of a check. `train` and `held_out` count the rows of the split that the training would make."""

    scan: Scan
    findings: tuple[Finding, ...]
    train: int = 0
    held_out: int = 0

    @property
    def is_refused(self) -> bool:
        return any(each.level == "refused" for each in self.findings)

    @property
    def is_faulty(self) -> bool:
        return any(each.level != "note" for each in self.findings)

    @property
    def problems(self) -> list[SpecProblem]:
        """What the training would refuse, as problems of the spec."""
        where = f"{self.scan.source}: "
        return [
            SpecProblem(
                each.pointer, f"{where if each.pointer == self.scan.pointer else ''}{each}", each.found, each.fix
            )
            for each in self.findings
            if each.level == "refused"
        ]

    @property
    def verdict(self) -> str:
        """The result in one line."""
        scan = self.scan
        part = "" if scan.is_whole else "first "
        told = f"{scan.source}: {part}{scan.rows:,} rows, {scan.form or 'of no form'}, {scan.usable:,} usable"
        worst = sorted(self.findings, key=lambda each: ("refused", "fault", "note").index(each.level))
        return f"{told}; {worst[0]}{f' and {len(worst) - 1} more' if worst[1:] else ''}" if worst else f"{told}; good"


def check(
    dataset: Dataset,
    rows: Iterable[Raw],
    evaluation: Evaluation | None,
    seed: int,
    other: tuple[Dataset, Iterable[Raw]] | None = None,
) -> Report:
    """Check all rows, and the split that the training would make of them.

    `other` are the rows to evaluate on, if no training rows are held out.
    """
    mine = scan_rows(Scan(dataset, dataset.title), rows)
    theirs = other and scan_rows(Scan(other[0], other[0].title, pointer="/evaluation/source"), other[1])
    findings = [*_of_scan(mine), *(_of_scan(theirs) if theirs else ())]
    if not mine.usable:
        return Report(mine, tuple(findings))
    train, held_out, found = _split(mine, evaluation, seed, theirs)
    return Report(mine, (*findings, *found), train, held_out)


def check_sample(dataset: Dataset, source: str, rows: Iterable[Raw], pointer: str = SOURCE) -> Report:
    """Check the first rows of a data set. They say nothing about the number of rows and the split."""
    scan = scan_rows(Scan(dataset, source, is_whole=False, pointer=pointer), rows)
    return Report(scan, tuple(_of_scan(scan)))


def refused(dataset: Dataset, problem: BadFile, pointer: str) -> Report:
    """The report of a data set whose files cannot be read."""
    scan = Scan(dataset, dataset.title, is_whole=False, pointer=pointer)
    scan.refuse(str(problem), problem.hint or GOOD_FILE)
    return Report(scan, tuple(scan.findings))


def scan_rows(scan: Scan, rows: Iterable[Raw]) -> Scan:
    """Read all rows once."""
    read = _until_bad(scan, rows)
    first = list(islice(read, PEEK_ROWS))
    reader = _reader(scan, columns_of(first)) if first else None
    for raw in chain(first, read):
        if reader:
            _judge(scan, reader, raw)
        scan.rows += 1
    if reader:
        scan.unused = tuple(reader.unused)
        scan.columns = {name: scan.columns.get(name, "empty") for name in columns_of([*first, scan.columns])}
    return scan


def separator_of(columns: list[str]) -> str | None:
    """The character that seems to separate the columns of a CSV or TSV file, if all of them are one column."""
    return next((mark for mark in OTHER_SEPARATORS if mark in columns[0]), None) if len(columns) == 1 else None


def _until_bad(scan: Scan, rows: Iterable[Raw]) -> Iterator[Raw]:
    try:
        yield from rows
    except BadFile as problem:
        scan.refuse(str(problem), problem.hint or GOOD_FILE)


def _reader(scan: Scan, columns: list[str]) -> Reader | None:
    """The reader of rows with these columns; None, and the reasons in the findings, if no form has them."""
    if mark := separator_of(columns):
        message = f"the columns are separated by {mark!r}"
        scan.refuse(
            message, "a comma in a .csv file, a tab in a .tsv file; save the file again", found=shown_columns(columns)
        )
    elif not _names_missing_columns(scan, columns):
        try:
            form = form_of(columns, scan.dataset)
        except UnsupportedRow as problem:
            scan.refuse(f"it has {problem}", problem.hint)
        else:
            scan.form = _name_of(form)
            return Reader(form, scan.dataset.ignore)
    return None


def _name_of(form: Form) -> str:
    return next((name for name, each in FORMS.items() if each is form), "columns")


def _names_missing_columns(scan: Scan, columns: list[str]) -> bool:
    """Whether templates name columns that the data lacks. The findings have the nearest names."""
    has, is_missing = f"the columns of {scan.source}: {shown_columns(columns)}", False
    for name, template in scan.dataset.columns or ():
        for column in columns_in(template or ""):
            if not has_column(columns, column):
                close = get_close_matches(column, columns, n=1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                message = f"the template names the column {column!r}, which the data lacks"
                scan.refuse(message, f"{meant}{has}", f"/dataset/columns/{name}", shown(template))
                is_missing = True
    return is_missing


def _judge(scan: Scan, reader: Reader, raw: Raw) -> None:
    number, row = scan.rows, None
    for name, value in raw.items():
        if name not in scan.columns and not is_empty(value):
            scan.columns[name] = reader.verdict(name)
    try:
        row = reader(raw)
    except LeftOut:
        scan.left_out += 1
    except UnsupportedRow as problem:
        scan.add("refused", str(problem), problem.hint, number)
    except Exception as error:  # noqa: BLE001  (the training leaves such a row out)
        scan.unusable += 1
        told = str(error) if isinstance(error, UnusableRow) else f"it cannot be read ({type(error).__name__})"
        scan.add("fault", f"{UNUSABLE}{told}", "correct the row, or take it out", number)
    scan.questions.add(row.question if row else None)
    content = row.content if row else None
    scan.contents.add(content)
    scan.lengths.append(len(content or ""))
    if row:
        _note_row(scan, row, content or "", number)


def _note_row(scan: Scan, row: Row, content: str, number: int) -> None:
    answers = [row.messages[at] for at in row.answers]
    scan.usable += 1
    scan.answers += len(answers) or 1
    scan.characters += len(content)
    scan.learnt_characters += sum(len(each["content"]) for each in answers) if row.messages else len(content)
    if damage := damage_of(content):
        scan.add("fault", f"the text has {damage}", "read the source in its own encoding and write UTF-8", number)
    for answer in answers:
        text = answer["content"].strip()
        if not text and "tool_calls" not in answer:
            scan.add("fault", "an earlier answer is empty, and is learnt", 'fill it, or set its "weight" to 0', number)
        elif len(text) == 1:
            fix = "nothing, if such answers are meant (a choice, a digit); else look for text[0]"
            scan.add("note", "an answer is one character", fix, number)


def _of_scan(scan: Scan) -> Iterator[Finding]:
    yield from scan.findings
    is_refused = scan.unusable == scan.rows or scan.unusable > MAX_BAD_ROWS * scan.rows
    if not scan.is_whole:
        is_refused = scan.rows >= FEW_ROWS and scan.unusable > MOST_UNUSABLE * scan.rows
    if scan.unusable and is_refused:
        part = "" if scan.is_whole else "first "
        kinds = (each for each in scan.kinds.values() if each.message.startswith(UNUSABLE))
        worst = max(kinds, key=lambda each: each.rows, default="")
        yield Finding(
            "refused",
            f"{scan.unusable} of the {part}{scan.rows} rows cannot be trained on; {worst}",
            f"at most {MAX_BAD_ROWS:.0%} of such rows",
            pointer=scan.pointer,
        )
    yield from scan.kinds.values()
    if scan.unused:
        names, fix = shown_columns(scan.unused), "nothing, if they mean nothing; else name them in dataset.columns"
        yield Finding("note", f"fields that the training does not use: {names}", fix, pointer=scan.pointer)
    if scan.is_whole and not scan.rows and not scan.findings:
        yield Finding("refused", "it has no rows", f"at least {MIN_TRAIN_ROWS} rows", pointer=scan.pointer)
    yield from _repeated(scan)


def _repeated(scan: Scan) -> Iterator[Finding]:
    exact, near = _repeats(scan.contents.exact), _repeats(scan.contents.near)
    asked = _repeats(scan.questions.exact)
    level: Level = "fault" if exact.rows > MAX_BAD_ROWS * scan.rows else "note"
    if scan.usable > 1 and exact.rows == scan.usable - 1 and scan.is_whole:
        fix = "at least 2 different rows: look for a template or a column with the same text in every row"
        yield Finding("refused", f"all {scan.usable} usable rows are the same text", fix, pointer=scan.pointer)
    elif exact.rows:
        message = f"the same text as row {exact.of}"
        yield Finding(level, message, "keep one of each", exact.rows, exact.row, scan.pointer)
    if near.rows > exact.rows:
        message = f"the text of row {near.of}, but for case and white space, and with the exact repetitions"
        yield Finding("note", message, "keep one of each", near.rows, near.row, scan.pointer)
    if asked.rows > exact.rows:
        message = "the prompt of an earlier row and another answer"
        fix = "keep the right answer, if only one is right"
        row = _first_other_answer(scan)
        yield Finding("note", message, fix, asked.rows - exact.rows, row, scan.pointer)


class _Repeats(NamedTuple):
    rows: int = 0
    row: int = 0
    of: int = 0


def _repeats(digests: array[int]) -> _Repeats:
    """How many rows repeat an earlier one, the first of them, and the row that it repeats."""
    pairs = [one for one, two in pairwise(sorted(filter(None, digests))) if one == two]
    repeated, seen = set(pairs), dict[int, int]()
    for row, digest in enumerate(digests) if pairs else ():
        if digest in repeated and seen.setdefault(digest, row) != row:
            return _Repeats(len(pairs), row, seen[digest])
    return _Repeats()


def _first_other_answer(scan: Scan) -> int:
    seen: dict[int, int] = {}
    for row, (asked, content) in enumerate(zip(scan.questions.exact, scan.contents.exact, strict=True)):
        if asked and seen.setdefault(asked, content) != content:
            return row
    return 0


def _split(scan: Scan, evaluation: Evaluation | None, seed: int, other: Scan | None) -> tuple[int, int, list[Finding]]:
    """The rows to train on and held out as the training splits them, and what is wrong with the split."""
    usable = _usable(scan, seed, scan.dataset.limit)
    findings: list[Finding] = []
    if evaluation and other:
        judge, held_out = other, _usable(other, seed, evaluation.max_rows)
    else:
        count = held_out_count(len(usable), evaluation)
        if evaluation and not count:
            fraction = evaluation.holdout_fraction
            message = f"evaluation.holdout_fraction {fraction} of {len(usable)} rows is less than one row"
            fix = f"at least {rows_to_hold_out_one(fraction)} rows, or a larger evaluation.holdout_fraction"
            findings.append(Finding("refused", message, fix))
        judge, held_out, usable = scan, usable[:count], usable[count:]
    asked = {judge.questions.exact[row] for row in held_out}
    train = [row for row in usable if scan.questions.exact[row] not in asked]
    if leaked := sorted(row for row in usable if scan.questions.exact[row] in asked):
        fix = "nothing: the training leaves them out"
        findings.append(Finding("note", "the prompt of a held-out row", fix, len(leaked), leaked[0]))
    near = {judge.questions.near[row] for row in held_out}
    if close := sorted(row for row in train if scan.questions.near[row] in near):
        message = "the prompt of a held-out row, but for case and white space; the evaluation counts what was learnt"
        findings.append(Finding("fault", message, "keep one of each", len(close), close[0]))
    if len(train) < MIN_TRAIN_ROWS:
        message = f"{len(train)} rows are left to train on, beside {len(held_out)} held out"
        fix = f"at least {MIN_TRAIN_ROWS}: add rows with other prompts, or lower evaluation.holdout_fraction"
        findings.append(Finding("refused", message, fix))
    return len(train), len(held_out), findings


def _usable(scan: Scan, seed: int, limit: int | None) -> Sequence[int]:
    """The numbers of the usable rows, in the order of the training."""
    return array("I", (row for row in shuffled(scan.rows, seed)[:limit] if scan.questions.exact[row]))
