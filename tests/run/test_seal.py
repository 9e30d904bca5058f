"""The seal's file, and the comparison of token ids and log-probabilities."""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from dropforge.base.errors import DropforgeError
from dropforge.run import seal as seals
from dropforge.run.artifacts import ArtifactFile, Manifest, Source
from dropforge.run.seal import (
    Agreement,
    Difference,
    Noise,
    Seal,
    SealedRow,
    compare_answer,
    compare_prompt,
    compare_tokens,
    divergence,
    read_seal,
)


def logs(**probabilities: float) -> dict[int, float]:
    """`logs(_7=0.5)`: the token 7 with a probability of 0.5."""
    return {int(name[1:]): math.log(value) for name, value in probabilities.items()}


def row(*tokens: dict[int, float], prompt: tuple[int, ...] = (2, 5, 9)) -> SealedRow:
    top = [(list(each), list(each.values())) for each in tokens]
    answer = [max(each, key=each.__getitem__) for each in tokens]
    return SealedRow(row=3, messages=None, prompt=list(prompt), answer=answer, top=top)


def seal(**noise: float) -> Seal:
    measured = {"divergence": 0.0, "gap": 0.0, **noise}
    return Seal(greedy=True, dtype="bfloat16", rows=[row(logs(_7=0.9))], noise=Noise(**measured))


def test_the_divergence_is_that_of_the_tokens_and_a_bucket_for_the_rest() -> None:
    expected, actual = logs(_1=0.5, _2=0.25), logs(_1=0.25, _2=0.5, _3=0.2)
    by_hand = 0.5 * math.log(2) + 0.25 * math.log(0.5) + 0.25 * math.log(1)
    assert divergence(expected, actual) == pytest.approx(by_hand)
    assert divergence(expected, expected) == 0


def test_a_token_that_the_endpoint_does_not_list_counts_as_its_least_likely() -> None:
    """Otherwise an endpoint that lists none of the sealed tokens would agree in the bucket for the rest."""
    expected, actual = logs(_1=0.99), logs(_8=0.9, _9=0.01)
    assert divergence(expected, actual) == pytest.approx(0.99 * math.log(99) + 0.01 * math.log(0.01 / 0.99))


def test_the_limits_follow_the_noise() -> None:
    quiet, loud = seal(divergence=1e-9, gap=1e-6), seal(divergence=1e-3, gap=0.5)
    assert quiet.limit == seals.LEAST_LIMIT
    assert loud.limit == pytest.approx(1e-2)
    assert quiet.tie == pytest.approx(0.02)
    assert loud.tie == pytest.approx(math.sqrt(10) * 0.5)


@pytest.mark.parametrize(
    ("actual", "position", "cause"),
    [
        ([5, 9], 1, "lacks its first token"),
        ([2, 2, 5, 9], 2, "first token twice"),
        ([1, 2, 5, 9], 1, "a further first token"),
        ([2, 5, 8], 3, "template"),
        ([2, 5, 9, 9], 4, "template"),
        ([2, 5], 3, "template"),
        ([], 1, "template"),
    ],
)
def test_every_difference_of_a_prompt_is_found(actual: list[int], position: int, cause: str) -> None:
    found = compare_prompt(row(logs(_7=0.9)), actual)
    assert found is not None
    assert (found.row, found.where, found.position) == (3, "prompt", position)
    assert cause in found.cause
    assert compare_prompt(row(logs(_7=0.9)), [2, 5, 9]) is None


def test_a_divergence_that_is_no_number_is_not_zero() -> None:
    assert not divergence({7: -0.1, 8: -3.0}, {7: math.nan, 8: -3.0}) < 1


def test_another_best_token_passes_at_a_near_tie_alone() -> None:
    near, clear = row(logs(_7=0.5, _8=0.49)), row(logs(_7=0.6, _8=0.3))
    exchanged = [logs(_8=0.5, _7=0.49)]
    agreed = compare_tokens(near, exchanged, tie=0.05)
    assert isinstance(agreed, Agreement)
    assert (agreed.tokens, agreed.ties) == (1, 1)
    assert agreed.divergence > 0
    refused = compare_tokens(clear, exchanged, tie=0.05)
    assert isinstance(refused, Difference)
    assert (refused.actual, refused.expected) == (8, 7)
    assert str(refused).startswith("row 3, token 1 of the answer: the endpoint has token id 8, the exported model ")


def test_a_greedy_answer_may_leave_the_sealed_one_at_a_near_tie_alone() -> None:
    sealed = row(logs(_7=0.9), logs(_5=0.5, _6=0.49), logs(_4=0.9))
    assert compare_answer(sealed, [7, 5, 4], 0.05) is True
    assert compare_answer(sealed, [7, 6, 1], 0.05) is False  # what follows a near-tie has another beginning
    for wrong, position in (([8, 5, 4], 1), ([7, 3, 4], 2), ([7, 5], 3), ([7, 5, 4, 4], 4)):
        found = compare_answer(sealed, wrong, 0.05)
        assert isinstance(found, Difference)
        assert found.position == position
    assert "has no token, the exported model token id 4" in str(compare_answer(sealed, [7, 5], 0.05))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"version": 2},
        {"rows": [{"row": 1, "messages": None, "prompt": [], "answer": [1], "top": [[[1], [0.0]]]}]},
        {"rows": [{"row": 1, "messages": None, "prompt": [1], "answer": [1], "top": []}]},
        {"rows": [{"row": 1, "messages": None, "prompt": [1], "answer": [1], "top": [[[1, 2], [0.0]]]}]},
        {"rows": [{"row": 1, "messages": None, "prompt": [1] * 1025, "answer": [1], "top": [[[1], [0.0]]]}]},
        {"noise": {"divergence": "NaN", "gap": 0}},
    ],
)
def test_what_is_no_seal_is_refused_without_its_text(change: dict[str, Any]) -> None:
    content = {**json.loads(seal().model_dump_json()), "secret": "a customer's text", **change}
    data = json.dumps(content).encode()
    with pytest.raises(DropforgeError, match=r"attempt-2/seal.json is not a seal") as caught:
        read_seal(bucket_with(data), "runs", manifest(data))
    assert "customer" not in str(caught.value)


def test_the_seal_is_the_file_that_the_manifest_lists() -> None:
    data = seal().model_dump_json().encode()
    assert read_seal(bucket_with(data), "runs", manifest(data)) == seal()
    assert read_seal(bucket_with(data), "runs", manifest(None)) is None
    with pytest.raises(DropforgeError, match="differs from its manifest"):
        read_seal(bucket_with(data.replace(b"bfloat16", b"float16 ")), "runs", manifest(data))
    with pytest.raises(DropforgeError, match=r"has 5000000 bytes; expected at most 4194304"):
        read_seal(bucket_with(data), "runs", manifest(data, size=5_000_000))


def manifest(data: bytes | None, size: int | None = None) -> Manifest:
    name, source = "attempt-2/seal.json", Source(uri="u", revision="r")
    files = [] if data is None else [_file(name, data, size or len(data))]
    return Manifest(
        run="demo",
        attempt=2,
        created=datetime.now(UTC),
        spec_sha256="0" * 64,
        base=source,
        dataset=source,
        serve_path="attempt-2/model",
        files=files,
    )


def _file(name: str, data: bytes, size: int) -> ArtifactFile:
    return ArtifactFile(path=name, size=size, sha256=hashlib.sha256(data).hexdigest(), crc32c="")


def bucket_with(data: bytes) -> Any:
    """A storage client whose only object has this content."""

    class Blob:
        def download_as_bytes(self, end: int, timeout: float, raw_download: bool) -> bytes:
            return data[: end + 1]

    class Client:
        def bucket(self, name: str) -> Client:
            return self

        def blob(self, name: str) -> Blob:
            assert name == "models/demo/attempt-2/seal.json"
            return Blob()

    return Client()
