"""The proofs of a run's containers, against what other containers can do."""

from __future__ import annotations

import hashlib
import hmac
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.run.proof import PROOF, is_document_proved, is_proved, new_key, proof, with_proof

KEY, OTHER = new_key(Random(1)), new_key(Random(2))
NAME = "models/demo-0123456789ab/MANIFEST.json"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(st.text().filter(lambda name: name != PROOF), VALUES, max_size=4)


def test_a_proof_is_an_hmac_of_name_and_content() -> None:
    expected = hmac.new(KEY.encode(), b"job-event\n{}", hashlib.sha256).hexdigest()
    assert proof(KEY, "job-event", b"{}") == expected
    assert len(KEY) == 64


@given(DOCUMENTS)
def test_a_document_is_proved_in_every_spelling(document: dict[str, Any]) -> None:
    data = with_proof(KEY, NAME, document)
    assert {name: value for name, value in json.loads(data).items() if name != PROOF} == document
    assert is_document_proved(KEY, NAME, data)
    respelled = json.dumps(dict(reversed(json.loads(data).items())), ensure_ascii=True, indent=7).encode()
    assert is_document_proved(KEY, NAME, respelled)


@given(DOCUMENTS, DOCUMENTS)
def test_another_key_name_or_content_is_no_proof(document: dict[str, Any], other: dict[str, Any]) -> None:
    data = with_proof(KEY, NAME, document)
    assert not is_document_proved(OTHER, NAME, data)
    assert not is_document_proved(KEY, "models/other/MANIFEST.json", data)
    claimed = json.dumps({**other, PROOF: json.loads(data)[PROOF]}).encode()
    same = json.dumps(document, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert is_document_proved(KEY, NAME, claimed) is same


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"3",
        b'{"proof": null}',
        b'{"proof": 1}',
        b'{"proof": "\xc3\xa9"}',
        b"\xff",
        b"[" * 100_000,
        b'{"proof": "\\ud800"}',
    ],
)
def test_other_texts_have_no_proof(data: bytes) -> None:
    assert not is_document_proved(KEY, NAME, data)


@pytest.mark.parametrize(
    "claimed", [None, "", 7, "é", "\ud800", proof(OTHER, "job-event", b"x"), proof(KEY, "job-event", b"y")]
)
def test_what_is_claimed_is_checked(claimed: object) -> None:
    assert not is_proved(KEY, "job-event", b"x", claimed)
    assert is_proved(KEY, "job-event", b"x", proof(KEY, "job-event", b"x"))


def test_a_run_without_a_key_proves_nothing_and_is_believed() -> None:
    """It was accepted before there were keys."""
    assert proof("", NAME, b"x") == ""
    assert json.loads(with_proof("", NAME, {"a": 1})) == {"a": 1}
    assert is_document_proved("", NAME, b"anything")
    assert is_proved("", NAME, b"x", None)
