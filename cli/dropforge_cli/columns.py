"""The columns of a data set, compared with the spec before a machine is paid for."""

from __future__ import annotations

import csv
import io
import json
from difflib import get_close_matches

from dropforge.base.errors import SpecProblem
from dropforge.cloud.clients import TIMEOUT_SECONDS, Clients
from dropforge.spec import Dataset, JobSpec
from dropforge.spec.parts import shown
from dropforge.spec.templates import FORMS, columns_in, shown_columns

from .sources import parts_of

FIRST_BYTES = 1 << 18  # of an object: enough for the first row of most data sets; the container reads the others
SEPARATORS = (";", "\t", "|")


def column_problems(spec: JobSpec, clients: Clients) -> list[SpecProblem]:
    """The columns that a spec names and its first row lacks.

    Data sets of the Hub, Parquet files, and objects that you may not read are left to the training container.
    """
    if not isinstance(spec.dataset, Dataset):
        return []
    problems = []
    for pointer, uri in spec.sources.items():
        columns = None if pointer == "/model/source" else first_columns(uri, clients)
        if columns is not None:
            problems += _problems(spec.dataset, uri, columns)
    return list(dict.fromkeys(problems))


def first_columns(uri: str, clients: Clients) -> list[str] | None:
    """The names of the columns in the first row of a gs:// object; None if they cannot be known here."""
    from google.api_core.exceptions import GoogleAPICallError

    if not uri.startswith("gs://") or not uri.endswith((".csv", ".jsonl", ".json")):
        return None
    bucket, name = parts_of(uri)
    blob = clients.storage().bucket(bucket).blob(name)
    try:
        data = blob.download_as_bytes(end=FIRST_BYTES - 1, timeout=TIMEOUT_SECONDS)
    except GoogleAPICallError:
        return None
    text = data.decode("utf-8-sig", "replace")
    return _csv_columns(text) if uri.endswith(".csv") else _json_columns(text)


def separator_of(columns: list[str]) -> str | None:
    """The character that seems to separate the columns of a CSV file, if it is no comma."""
    return next((mark for mark in SEPARATORS if mark in columns[0]), None) if len(columns) == 1 else None


def _csv_columns(text: str) -> list[str] | None:
    try:
        return next(csv.reader(io.StringIO(text), strict=True), None)
    except csv.Error:
        return None


def _json_columns(text: str) -> list[str] | None:
    """The fields of the first object, in JSON lines or in a list."""
    try:
        row, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except (ValueError, RecursionError):
        return None
    return [*row]


def _problems(dataset: Dataset, uri: str, columns: list[str]) -> list[SpecProblem]:
    has = f"the columns of {uri}: {shown_columns(columns)}"
    if mark := separator_of(columns):
        message = f"the columns of {uri} are separated by {mark!r}"
        return [SpecProblem("/dataset/source", message, shown_columns(columns), "commas; save the file again")]
    if dataset.columns is None:
        forms = [dataset.format] if dataset.format in FORMS else [*FORMS]
        if any(set(FORMS[form]) <= {*columns} for form in forms):
            return []
        expected = f"{' or '.join('+'.join(FORMS[form]) for form in forms)}, or templates in dataset.columns"
        return [SpecProblem("/dataset/source", "the rows have none of the known forms", has, expected)]
    problems = []
    for name, template in dataset.columns:
        for column in columns_in(template or ""):
            if column not in columns:
                close = get_close_matches(column, columns, n=1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                message = f"the template names the column {column!r}, which the data lacks"
                problems.append(SpecProblem(f"/dataset/columns/{name}", message, shown(template), f"{meant}{has}"))
    return problems
