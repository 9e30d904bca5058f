"""Rows to token ids: the same on any number of cores, and read from the bucket by a later attempt."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from containers.common import chat, read_rows, tokenise
from containers.common.errors import JobError
from containers.common.processes import MAX_PROCESSES, cores
from containers.common.read_rows import mean_characters, processes_for
from containers.common.tokenise import TokenCache, Tokeniser
from dropforge.rows import Row
from dropforge.run.artifacts import tokens_object

from .. import forked

RUNS = "runs-bucket"
ROWS = [
    Row(
        (
            {"role": "user", "content": f"Question: how many cars cost {n}\nContext: CREATE TABLE cars (price INT)"},
            {"role": "assistant", "content": f"select count(*) from cars where price = {n}"},
        ),
        number=1000 + n,
    )
    for n in range(60)
]
LONG = Row(({"role": "user", "content": "cars " * 300}, {"role": "assistant", "content": "select"}))


@pytest.fixture(scope="module")
def base(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer, with a template that refuses the question about a price of 37 and more."""
    directory = tmp_path_factory.mktemp("base")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(base_model / name, directory)
    template = (base_model / "chat_template.jinja").read_text()
    refuse = "{% for n in ('37', '59') %}{% if 'cost ' + n in messages[0]['content'] %}{{ raise_exception('no ' + n) }}"
    (directory / "chat_template.jinja").write_text(refuse + "{% endif %}{% endfor %}" + template)
    return directory


@pytest.fixture
def tokeniser(base_model: Path) -> Tokeniser:
    return Tokeniser.load(str(base_model), False, "sft", None)


@pytest.fixture
def cache(cloud: Any, tmp_path: Path) -> TokenCache:
    return TokenCache(cloud.client, RUNS, f"tokens-{uuid.uuid4().hex[:12]}", tmp_path)


def deaf(tokeniser: Tokeniser, cache: TokenCache) -> Tokeniser:
    """A tokeniser that can read the cache and fails when it has to encode a row."""
    nothing = SimpleNamespace(chat_template=tokeniser.tokenizer.chat_template)
    return replace(tokeniser, cache=cache, tokenizer=nothing)


def test_several_processes_give_the_same_token_ids_in_the_same_order(
    tokeniser: Tokeniser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "CHUNK_ROWS", 7)
    rows = [*ROWS[:50], LONG, *ROWS[50:]]
    alone = replace(tokeniser, processes=1).encode(rows, 128, "x")
    together = replace(tokeniser, processes=2).encode(rows, 128, "x")
    assert together == alone == chat.encode(tokeniser.tokenizer, rows, 128, "x")
    assert (alone.dropped, len(alone.input_ids)) == (1, 60)


def test_a_row_that_the_template_refuses_is_named_by_its_number(
    base: Path, cloud: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes are forked from one that has imported the tokenizers; the test above spawns them."""
    forked.prepare(cloud.environment())
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forked.CONTEXT)
    monkeypatch.setattr(tokenise, "CHUNK_ROWS", 7)
    refusing = Tokeniser.load(str(base), False, "sft", None)
    for processes in (1, 2):
        encoded = replace(refusing, processes=processes).encode(ROWS, 128, "gs://d/x")
        assert encoded.refused == (37, 59)
        assert (len(encoded.input_ids), encoded.dropped) == (58, 2)
        told = capsys.readouterr().err
        assert "left out 2 of 60 rows of gs://d/x, which cannot be trained on" in told
        assert "row 1037: the model's chat template refuses it: TemplateError at" in told
    with pytest.raises(JobError, match="3 of 23 rows of gs://d/x cannot be trained on; expected at most 10%"):
        refusing.encode([*ROWS[:20], ROWS[37], ROWS[59], ROWS[37]], 128, "gs://d/x")


def test_a_later_attempt_reads_the_token_ids_and_does_not_make_them(tokeniser: Tokeniser, cache: TokenCache) -> None:
    rows = [*ROWS, LONG]
    first = replace(tokeniser, cache=cache).encode(rows, 128, "x")
    assert (first.truncated, first.dropped) == (1, 1)
    assert deaf(tokeniser, cache).encode(rows, 128, "x") == first
    assert list(cache.directory.iterdir()) == []


@pytest.mark.parametrize("key", ["", "o" * 64], ids=["no proof", "another run's proof"])
def test_token_ids_of_another_run_are_not_read(tokeniser: Tokeniser, cache: TokenCache, key: str) -> None:
    forger, owner = replace(cache, run_key=key), replace(cache, run_key="k" * 64)
    forged = replace(tokeniser, cache=forger).encode(ROWS, 128, "x")
    name = tokeniser.key(ROWS, 128)
    assert forger.read(name) == forged
    assert owner.read(name) is None
    replace(tokeniser, cache=owner).encode(ROWS, 128, "x")
    assert owner.read(name) == forged  # the same rows, made and saved again


@pytest.mark.parametrize(
    "damage",
    [
        lambda data, other: b"",
        lambda data, other: data[: len(data) // 2],
        lambda data, other: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data, other: data.replace(b'truncated\\": 0', b'truncated\\": 7'),
        lambda data, other: other,
    ],
    ids=["empty", "torn", "a bit", "a count", "other rows"],
)
def test_damaged_token_ids_are_made_and_saved_again(
    tokeniser: Tokeniser,
    cache: TokenCache,
    damage: Callable[[bytes, bytes], bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cached = replace(tokeniser, cache=cache)
    first, _ = cached.encode(ROWS, 128, "x"), cached.encode(ROWS[:30], 128, "x")
    names = [tokens_object(cache.run, cached.key(rows, 128)) for rows in (ROWS, ROWS[:30])]
    good, other = (cache.client.bucket(RUNS).blob(name).download_as_bytes() for name in names)
    bad = damage(good, other)
    assert bad != good
    cache.client.bucket(RUNS).blob(names[0]).upload_from_string(bad)
    capsys.readouterr()
    assert cached.encode(ROWS, 128, "x") == first
    assert "cannot be used, so the rows are tokenised again" in capsys.readouterr().err
    assert deaf(tokeniser, cache).encode(ROWS, 128, "x") == first


def test_a_bucket_that_fails_does_not_fail_the_attempt(
    tokeniser: Tokeniser, cache: TokenCache, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = replace(cache, bucket="no-such-bucket")
    assert replace(tokeniser, cache=lost).encode(ROWS, 128, "x") == tokeniser.encode(ROWS, 128, "x")
    assert "were not saved for a later attempt" in capsys.readouterr().err


def test_whatever_changes_the_token_ids_changes_the_key(tokeniser: Tokeniser, base: Path) -> None:
    others = [
        tokeniser.key(ROWS, 129),
        tokeniser.key(ROWS[1:], 128),
        tokeniser.key([replace(ROWS[0], muted=frozenset({0})), *ROWS[1:]], 128),
        replace(tokeniser, method="dpo").key(ROWS, 128),
        replace(tokeniser, base=str(base)).key(ROWS, 128),
        Tokeniser.load(str(base), False, "sft", None).key(ROWS, 128),
    ]
    assert len({tokeniser.key(ROWS, 128), *others}) == 7
    assert tokeniser.key([replace(row, number=0) for row in ROWS], 128) == tokeniser.key(ROWS, 128)


def test_few_rows_are_not_worth_a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rows, "cores", lambda: 64)
    assert processes_for(len(ROWS), mean_characters(ROWS)) == 1
    many = [Row((), "x" * 100_000)] * 81
    assert processes_for(len(many), mean_characters(many)) == MAX_PROCESSES


def test_cores_are_known_where_no_process_has_an_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no such call. A large data set then failed."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert 1 <= cores() <= (os.cpu_count() or 1)
