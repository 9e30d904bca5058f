"""The parity seal of a model: how the exported model answers held-out prompts, and how to compare an endpoint with it.

    models/<run>/attempt-1/seal.json    written by the training container, listed in the manifest with its digest

A row of the seal has a prompt, the model's greedy answer, and for each token of the answer the 20 most likely tokens
with their log-probabilities. Token ids are compared exactly. Log-probabilities are compared by their Kullback-Leibler
divergence, never by a fixed tolerance: the container measures the noise of another attention kernel on the same
weights, and this noise decides how far an endpoint may differ from the seal. Pure Python: the functions have no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dropforge.base.errors import Malformed

from .artifacts import Manifest, attempt_directory, model_uri, read_artifact

SEAL = "seal.json"
ROWS = 32
TOP = 20  # vLLM's limit on the log-probabilities of a prompt (--max-logprobs)
ANSWER_TOKENS = 32
ROW_TOKENS = 1024  # prompt and answer
MAX_BYTES = 4 << 20  # 32 rows of 1024 tokens and 32 answer tokens are about 700 kB

# Of the mean divergence: good endpoints have 0.7 to 2.0 times the noise, faults 11 times or more (measurements.md). A
# fixed bound of 5e-4 nats lets the rounding to 4 bits pass in 9 of 16 models.
FLOOR_FACTOR = 10
LEAST_LIMIT = 5e-5  # nats: 16 bits round a log-probability by about 4e-3, which is a divergence of 8e-6
_LEAST = 1e-9  # the smallest probability that differs from 0: the ids' probabilities are rounded

Distribution = Mapping[int, float]  # log-probabilities by token id
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=ROW_TOKENS)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SealedRow(_Part):
    """A held-out prompt and its greedy answer. `row` counts the held-out rows from 1.

    `messages` are the prompt of a chat request; None for a row of plain text. `top` has for each token of the answer
    the most likely ids, best first, and their log-probabilities.
    """

    row: int
    messages: list[dict[str, str]] | None
    prompt: Ids
    answer: Ids
    top: Annotated[list[tuple[list[int], list[float]]], Field(max_length=ANSWER_TOKENS)]

    @model_validator(mode="after")
    def _has_a_distribution_for_each_token(self) -> SealedRow:
        if not self.prompt or not self.answer or len(self.top) != len(self.answer):
            raise ValueError(f"row {self.row} has {len(self.answer)} tokens and {len(self.top)} distributions")
        if any(not 0 < len(ids) == len(values) <= TOP for ids, values in self.top):
            raise ValueError(f"row {self.row}: a distribution has between 1 and {TOP} tokens")
        return self

    def distributions(self) -> list[Distribution]:
        return [dict(zip(ids, values, strict=True)) for ids, values in self.top]


class Noise(_Part):
    """The rounding noise of a model: the changes by another attention kernel in 16 bits, with the same weights.

    `divergence` is the mean in nats; `gap` is the largest change of the difference between the two best
    log-probabilities.
    """

    divergence: float
    gap: float


class Seal(_Part):
    """The content of seal.json.

    `links` has what was measured at the export: `adapter_to_merged` is a mean divergence in nats, `saved_to_reloaded`
    the number of tensors that differ in a bit, `trained_to_exported` the difference in nats between the mean losses of
    MaxText's model and the exported one. `greedy`: a request without sampling parameters gets the greedy answer.
    """

    version: Literal[1] = 1
    greedy: bool
    dtype: str
    rows: Annotated[list[SealedRow], Field(min_length=1, max_length=ROWS)]
    noise: Noise
    links: dict[str, float] = {}

    @property
    def limit(self) -> float:
        """The mean divergence below which an endpoint passes, in nats."""
        return max(LEAST_LIMIT, FLOOR_FACTOR * self.noise.divergence)

    @property
    def tie(self) -> float:
        """The difference of two log-probabilities, in nats, up to which noise may exchange two tokens.

        Divergence grows with the square of such a difference (8 * divergence = gap ** 2 between two tokens alone), so
        both bounds of `limit` have their counterpart here.
        """
        return max(math.sqrt(8 * self.limit), math.sqrt(FLOOR_FACTOR) * self.noise.gap)


class Difference(NamedTuple):
    """The first difference between an endpoint and its seal, in numbers alone: messages never repeat training text.

    `row` counts the held-out rows, `position` the tokens of the prompt or the answer (`where`), both from 1. A token
    is None where the endpoint or the seal has no further token.
    """

    row: int
    where: Literal["prompt", "answer"]
    position: int
    actual: int | None
    expected: int | None
    cause: str

    def __str__(self) -> str:
        return (
            f"row {self.row}, token {self.position} of the {self.where}: the endpoint has {_shown(self.actual)}, "
            f"the exported model {_shown(self.expected)}; likely cause: {self.cause}"
        )


class Farthest(NamedTuple):
    """The token of an answer whose distribution diverges most, by `divergence` nats.

    `actual` and `expected` are the log-probabilities of `token`, the exported model's likeliest token there.
    """

    divergence: float
    row: int
    position: int
    token: int
    actual: float
    expected: float

    def __str__(self) -> str:
        return (
            f"row {self.row}, token {self.position} of the answer: token id {self.token} has a probability of "
            f"{math.exp(self.actual):.4f}, and {math.exp(self.expected):.4f} by the exported model"
        )


class Agreement(NamedTuple):
    """A row that agrees: the sum of its divergences, its tokens, the near-ties that were exchanged, its worst token."""

    divergence: float
    tokens: int
    ties: int
    farthest: Farthest


def read_seal(client: Any, bucket: str, manifest: Manifest) -> Seal | None:
    """The seal of a committed model; None for a model without a seal.

    Raises NotFound, and Malformed if the seal is not the file that the manifest lists, or is unreadable.
    """
    path = f"{attempt_directory(manifest.attempt)}/{SEAL}"
    listed = next((file for file in manifest.files if file.path == path), None)
    if listed is None:
        return None
    name = f"{model_uri(bucket, manifest.run)}/{path}"
    if listed.size > MAX_BYTES:
        raise Malformed(f"{name} has {listed.size} bytes; expected at most {MAX_BYTES}")
    data = read_artifact(client, bucket, manifest, SEAL)
    try:
        return Seal.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]  # the input has training text
        raise Malformed(f"{name} is not a seal that this version reads: {problem['msg']}") from None


def divergence(expected: Distribution, actual: Distribution) -> float:
    """The Kullback-Leibler divergence of the tokens in `expected` and a bucket for the rest, in nats.

    A token that `actual` lacks counts with its highest possible probability: the result is then a lower bound. NaN for
    a NaN among the log-probabilities, which is below no limit.
    """
    most = unlisted(actual)
    pairs = [(value, actual.get(token, most)) for token, value in expected.items()]
    rest, other = (_rest(pair[side] for pair in pairs) for side in (0, 1))
    total = sum(math.exp(value) * (value - found) for value, found in pairs) + rest * math.log(rest / other)
    return 0.0 if total < 0 else total  # not `max`, which would make 0 of NaN


def gap(of: Distribution, token: int) -> float:
    """A token's distance from the best log-probability, in nats; a lower bound for a token that is not listed."""
    return max(of.values()) - of.get(token, unlisted(of))


def unlisted(of: Distribution) -> float:
    """The highest log-probability of a token outside the list: the lowest in the list, or all of the rest."""
    return min(*of.values(), math.log(_rest(of.values())))


def _rest(values: Iterable[float]) -> float:
    return max(_LEAST, 1.0 - sum(map(math.exp, values)))


def best(of: Distribution) -> int:
    return max(of, key=of.__getitem__)


def compare_prompt(row: SealedRow, actual: Sequence[int]) -> Difference | None:
    """The first difference of the ids that the endpoint made of the row's messages."""
    position = _first_difference(row.prompt, actual)
    if position is None:
        return None
    cause = _cause_of_prompt(row.prompt, list(actual), position)
    return _difference(row, "prompt", position, actual, row.prompt, cause)


def compare_tokens(row: SealedRow, actual: Sequence[Distribution], tie: float) -> Agreement | Difference:
    """Compare the distributions of the answer's tokens, each given the prompt and the tokens before it.

    The best tokens may differ only where noise explains the difference: `tie` is the seal's.
    """
    tokens: list[Farthest] = []
    ties = 0
    for position, (expected, found) in enumerate(zip(row.distributions(), actual, strict=True), 1):
        token, diverges = best(expected), divergence(expected, found)
        listed = found.get(token, unlisted(found))
        tokens.append(Farthest(diverges, row.row, position, token, listed, expected[token]))
        if best(found) == token:
            continue
        if gap(expected, best(found)) > tie:
            cause = cause_of_weights(sum(each.divergence for each in tokens) / position)
            return Difference(row.row, "answer", position, best(found), token, cause)
        ties += 1
    return Agreement(sum(each.divergence for each in tokens), len(tokens), ties, max(tokens))


def compare_answer(row: SealedRow, actual: Sequence[int], tie: float) -> bool | Difference:
    """Whether the endpoint's greedy answer is the seal's in each token.

    False if the first difference is at a near-tie: the tokens after it have another beginning and are not compared.
    """
    position = _first_difference(row.answer, actual)
    if position is None:
        return True
    is_token = position < len(actual) and position < len(row.answer)
    if is_token and gap(row.distributions()[position], actual[position]) <= tie:
        return False
    return _difference(row, "answer", position, actual, row.answer, "the generation config, or the prefix cache")


def cause_of_weights(mean: float) -> str:
    """The likely cause of different probabilities for the same tokens, by their mean divergence in nats."""
    if mean < 0.05:
        return "dtype, quantisation, or the adapter's scale"
    return "the adapter (not merged, or of another run), or other weights"


def _cause_of_prompt(expected: list[int], actual: list[int], position: int) -> str:
    if actual == expected[1:]:
        return "bos: the endpoint's prompt lacks its first token"
    if actual == [expected[0], *expected]:
        return "bos: the endpoint's prompt has its first token twice"
    if actual[1:] == expected:
        return "bos: the endpoint's prompt has a further first token"
    return "the chat template, or the tokenizer"


def _difference(
    row: SealedRow,
    where: Literal["prompt", "answer"],
    position: int,
    actual: Sequence[int],
    expected: Sequence[int],
    cause: str,
) -> Difference:
    at = [ids[position] if position < len(ids) else None for ids in (actual, expected)]
    return Difference(row.row, where, position + 1, at[0], at[1], cause)


def _first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    for position, (one, other) in enumerate(zip(expected, actual, strict=False)):
        if one != other:
            return position
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def _shown(token: int | None) -> str:
    return "no token" if token is None else f"token id {token}"
