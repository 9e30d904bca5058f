"""No value of a training row leaves the container in an error: its column and its number do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.deployments import SETTINGS

from containers.common import chat, rows
from containers.common.job import Job
from containers.common.outcome import Outcome, outcome_of
from containers.common.redactor import Redactor
from containers.common.report import Reporter
from containers.common.stop import StopRequest
from dropforge.base.errors import ErrorClass
from dropforge.cloud.clients import Clients
from dropforge.rows import Row
from dropforge.run.events import Failed, JobEvent, read_job_events
from dropforge.run.record import Record, RunError, RunState, Transition
from dropforge.spec import Dataset, Evaluation
from dropforge.tell.news import state_news
from dropforge.tell.slack import message_of

from .test_rows import read

CANARY = "Canary7f3a"
NUMBER = 73190042
RUN = "demo-0123456789ab"
JOB = Job.from_environment(
    {"DROPFORGE_PROJECT": "p", "DROPFORGE_RUN": RUN, "DROPFORGE_ATTEMPT": "1", "DROPFORGE_RUNS_BUCKET": "b"}
)


def talk(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def said(content: Any, role: Any = "user", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


ANSWER = said(CANARY, "assistant")
ROWS: list[dict[str, Any]] = [
    {"prompt": CANARY, "completion": ""},
    {"prompt": "C", "completion": CANARY},
    {"prompt": [CANARY], "completion": CANARY},
    {"prompt": {CANARY: CANARY}, "completion": NUMBER},
    {"prompt": NUMBER, "completion": [CANARY]},
    {"prompt": None, "completion": CANARY},
    {"prompt": [said("ask")], "completion": [said(CANARY, "assistant", tool_calls=[CANARY])]},
    {"messages": CANARY},
    {"messages": NUMBER},
    {"messages": {CANARY: 1}},
    talk(CANARY),
    talk(said(CANARY, CANARY), ANSWER),
    talk(said(CANARY, [CANARY]), ANSWER),
    talk(said([CANARY]), ANSWER),
    talk(said("ask"), said(CANARY, "assistant", weight=CANARY)),
    talk(said("ask"), said(CANARY, "assistant", weight=NUMBER)),
    talk(said("ask"), said(CANARY, "tool"), ANSWER),
    talk(said("ask"), ANSWER, tools=[{"name": CANARY}]),
    talk(said(CANARY)),
    {"text": "C"},
    {"text": [CANARY]},
    {"text": NUMBER},
]
FILES = {
    "x.jsonl": [
        *[f'{{"text": "{CANARY}', f'["{CANARY}"]', f'"{CANARY}"', str(NUMBER), f'{{"text": "{CANARY}\t"}}'],
        *["7" * 5000 + CANARY, "[" * 100_000, f'{{"text": "{CANARY}"}} {CANARY}'],
    ],
    "x.json": [f'"{CANARY}"', f'["{CANARY}"]', f'{{"a": "{CANARY}"', f"[{NUMBER}, {{}}]"],
    "x.jsonl.gz": [CANARY],
    "x.arrow": [CANARY],
    "x.csv": [f'text\n"{CANARY}', f'text\n"a"{CANARY}\n'],
    "x.parquet": [f"PAR1{CANARY}PAR1", CANARY],
}


def told(work: Callable[[], Any]) -> str:
    """All that leaves the control plane when `work` ends an attempt: the event as stored, the record, Slack."""

    def run() -> Outcome:
        work()
        raise AssertionError("expected an error")

    outcome = outcome_of(run, JOB, StopRequest(), Redactor())
    assert outcome.error_class in (ErrorClass.DATA, ErrorClass.CODE, ErrorClass.CONFIG)
    events: list[JobEvent] = []
    reporter = Reporter(JOB, Redactor(), Clients({}))
    reporter._send = events.append  # type: ignore[method-assign, assignment]
    reporter.ended(outcome)
    [stored] = read_job_events(events[0].model_dump_json().encode(), RUN)
    assert isinstance(stored, Failed)
    now = datetime(2026, 11, 23, tzinfo=UTC)
    error = RunError(error_class=stored.error_class, message=stored.message, hint=stored.hint)
    record = Record(
        run=RUN, name="demo", source="gs://b/x.json", state=RunState.FAILED, created=now,
        history=[Transition(state=RunState.FAILED, time=now)], error=error,
    )  # fmt: skip
    news = state_news(record, None, SETTINGS, now)
    assert news
    message = message_of(news)
    return json.dumps([stored.model_dump(mode="json"), record.model_dump(mode="json"), message.text, message.blocks])


def quotes_a_row(text: str) -> bool:
    return "Canary" in text or str(NUMBER) in text


@pytest.mark.parametrize("row", ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_an_unusable_row_is_named_by_its_number_and_columns(row: dict[str, Any]) -> None:
    dataset = Dataset(source="gs://data/x.jsonl")
    text = told(lambda: rows.prepare([row] * 20, dataset, None, seed=0))
    assert "rows" in text or re.search(r"row \d+ of", text)
    assert not quotes_a_row(text)


@pytest.mark.parametrize(("name", "content"), [(name, content) for name, texts in FILES.items() for content in texts])
def test_a_malformed_file_is_named_by_its_line(cloud: Any, name: str, content: str, tmp_path: Path) -> None:
    text = told(lambda: read(cloud, tmp_path, {name: content.encode()}))
    assert "data set" in text
    assert not quotes_a_row(text)


@pytest.mark.parametrize("repeated", [{"text": f"{CANARY} and more"}, {"prompt": CANARY, "completion": CANARY}])
def test_rows_that_teach_nothing_are_counted(repeated: dict[str, str]) -> None:
    dataset = Dataset(source="gs://data/x.jsonl")
    assert not quotes_a_row(told(lambda: rows.prepare([repeated] * 40, dataset, None, seed=0)))
    few = [{"prompt": f"{CANARY} {n}", "completion": CANARY} for n in range(9)]
    assert not quotes_a_row(told(lambda: rows.prepare(few, dataset, Evaluation(), seed=0)))


TEMPLATES = {
    "{{ raise_exception('the roles must alternate') }}": "the roles must alternate",
    "{{ raise_exception('bad: ' + messages[0].content) }}": "TemplateError at",
    "{{ messages[0].content | int + messages[0].content }}": "TypeError at",
    "{{ messages[0].content.absent.more }}": "UndefinedError at",
    "{{ messages[0][messages[0].content].more }}": "UndefinedError at",
}


@pytest.mark.parametrize(("template", "words"), TEMPLATES.items())
def test_a_template_that_refuses_a_row_says_only_words_of_its_own(base_model: Path, template: str, words: str) -> None:
    tokenizer = chat.load_tokenizer(str(base_model), trust_remote_code=False)
    first = "{% if 'ANSWER' not in messages[-1].content and messages[0].content != 'QUESTION' %}"
    tokenizer.chat_template = f"{first}{template}{{% endif %}}{tokenizer.chat_template}"
    row = Row(({"role": "user", "content": CANARY}, {"role": "assistant", "content": f"{CANARY} answers"}), number=17)
    text = told(lambda: chat.encode(tokenizer, [row], 512, "gs://data/x.jsonl"))
    assert words in text
    assert "row 17" in text or "TypeError" in text
    assert not quotes_a_row(text)


def test_short_rows_are_described_by_their_length(base_model: Path) -> None:
    tokenizer = chat.load_tokenizer(str(base_model), trust_remote_code=False)
    short = [Row((), "Can7f3a") for _ in range(20)]
    assert "Can7f3a" not in told(lambda: chat.encode(tokenizer, short, 512, "gs://data/x.jsonl"))


@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError, TypeError, UnicodeError, ArithmeticError])
def test_an_unknown_error_is_told_by_its_type_and_place(
    kind: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind(f"cannot collate {{'text': '{CANARY}'}}")

    text = told(fail)
    assert f"{kind.__name__} at containers/common/test_rows_in_errors.py:" in text
    assert not quotes_a_row(text)
    assert CANARY in capfd.readouterr().err  # the container's own log has all of it


def test_the_cause_of_an_error_is_in_the_containers_log(
    cloud: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told(lambda: read(cloud, tmp_path, {"x.parquet": CANARY.encode()}))
    assert "Traceback" in capfd.readouterr().err
