"""Compares an endpoint with the seal of its model (run/seal.py), in shares that fit into a function's time.

For each row of the seal, two requests: the likeliest tokens at each token of the sealed answer, given the sealed ids
(`prompt_logprobs`); and the greedy answer to the row's messages, through the route that clients use. The second request
also tests the chat template, the generation defaults and the prefix cache; the first request does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, ErrorClass, Malformed, NotFound
from dropforge.base.redact import cut
from dropforge.cloud.classify import client_errors
from dropforge.context import Context
from dropforge.run.artifacts import read_manifest
from dropforge.run.record import MAX_REASON, Parity
from dropforge.run.seal import (
    ROWS,
    TOP,
    Agreement,
    Difference,
    Distribution,
    Seal,
    SealedRow,
    cause_of_weights,
    compare_answer,
    compare_prompt,
    compare_tokens,
    read_seal,
)

REQUEST_SECONDS = 60.0
MOST = 1e-3  # of a log-probability: a probability is 1 at most, and rounding adds less
SHARE = timedelta(seconds=180)  # of a call, before its last row; a function may take 540 s
HINT = (
    "the model is kept, and not served. Compare the images of training and serving, and the endpoint's flags; "
    "docs/serving.md#parity names what each cause means"
)
BAD_ANSWER = 400  # in place of a status: another request would be answered as badly
UNSEALED = "the model has no seal: its trainer made none"


class Refused(Exception):
    """The endpoint did not answer a request of the comparison as an OpenAI-compatible engine does."""


def compare(
    context: Context,
    run: str,
    known: Parity | None,
    url: str,
    model: str,
    key: str = "",
    audience: str = "",
    most: int = ROWS,
) -> tuple[Parity, CloudError | None]:
    """The comparison after this call's share of the rows; `known` is what earlier calls have found, `key` the API key.

    `audience` is the URL for which a token is valid, if not `url`. `most` rows of the seal are compared.

    Also the error that ended the call early: TRANSIENT if the endpoint did not answer, PARITY if it differs from its
    model. A difference that an earlier call has found is final: if the answer of that call was lost, the workflow calls
    again.
    """
    if known is not None and known.is_over:
        refused = CloudError(ErrorClass.PARITY, known.reason, HINT) if known.state == "failed" else None
        return known, refused
    storage, bucket = context.cloud.clients.storage(), context.settings.runs_bucket
    try:
        manifest = read_manifest(storage, bucket, run, context.store.key(run))
        seal = read_seal(storage, bucket, manifest) if manifest else None
    except (Malformed, NotFound) as damaged:  # another call would find the same
        reason = cut(f"the seal of the model cannot be read: {damaged}", MAX_REASON)
        return Parity(state="failed", reason=reason), CloudError(ErrorClass.PARITY, reason, HINT)
    if seal is None:
        return Parity(state="unsealed", reason=UNSEALED), None
    seal = evolve(seal, rows=seal.rows[:most])
    parity = known or Parity(state="checking", links=seal.links, limit=seal.limit, floor=seal.noise.divergence)
    endpoint, until = Endpoint(context.cloud.clients.endpoint(audience or url, key), url, model), context.now() + SHARE
    try:
        for reached in progress(parity, seal, endpoint):
            parity = reached
            if context.now() >= until:
                break
    except CloudError as error:
        failed = {"state": "failed", "reason": error.message} if error.error_class is ErrorClass.PARITY else {}
        return evolve(parity, **failed), error
    return parity, None


def progress(parity: Parity, seal: Seal, endpoint: Endpoint) -> Iterator[Parity]:
    """`parity` after each further row; sealed after the last. Raises CloudError, as `compare` returns it."""
    for row in seal.rows[parity.rows :]:
        parity = _with_row(parity, seal, row, endpoint)
        if parity.rows < len(seal.rows):
            yield parity
    if not parity.divergence < seal.limit:
        raise _differs(
            f"its probabilities diverge by {parity.divergence:.2g} nats on average over {parity.tokens} tokens; "
            f"expected less than {seal.limit:.2g}; most in {parity.farthest}; likely cause: "
            f"{cause_of_weights(parity.divergence)}"
        )
    yield evolve(parity, state="sealed")


class Endpoint:
    """Asks an endpoint for token ids and probabilities. The requests are vLLM's, beyond OpenAI's."""

    def __init__(self, session: Any, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    def tokens(self, row: SealedRow) -> tuple[list[int], list[Distribution]]:
        """The ids that the endpoint read, and its distribution at each token of the sealed answer.

        Raises Refused for a log-probability that cannot be one: comparisons with NaN would pass.
        """
        ids = [*row.prompt, *row.answer]
        answer = self._post("completions", prompt=ids, max_tokens=1, temperature=0, prompt_logprobs=TOP)
        choice = answer["choices"][0]
        entries = choice["prompt_logprobs"][len(row.prompt) : len(ids)]
        found: list[Distribution] = [
            {int(token): float(entry["logprob"]) for token, entry in each.items()} for each in entries
        ]
        if odd := [value for each in found for value in each.values() if not -math.inf < value <= MOST]:
            raise Refused(f"/v1/completions has a log-probability of {odd[0]}", BAD_ANSWER)
        return [int(token) for token in choice["prompt_token_ids"]], found

    def chat(self, row: SealedRow, **sampling: Any) -> tuple[list[int], list[int]]:
        """The ids that the endpoint made of the row's messages, and those of its answer."""
        answer = self._post("chat/completions", messages=row.messages, max_tokens=len(row.answer), **sampling)
        ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        return [int(token) for token in ids[0]], [int(token) for token in ids[1]]

    def greedy(self, row: SealedRow) -> list[int]:
        """The ids of the endpoint's greedy answer to the sealed ids."""
        answer = self._post("completions", prompt=row.prompt, max_tokens=len(row.answer), temperature=0)
        return [int(token) for token in answer["choices"][0]["token_ids"]]

    def _post(self, route: str, **body: Any) -> Any:
        request = {"model": self._model, "return_token_ids": True, **body}
        response = self._session.post(f"{self._url}/v1/{route}", json=request, timeout=REQUEST_SECONDS)
        if response.status_code != 200:  # the text may repeat the prompt
            raise Refused(f"/v1/{route} was answered with {response.status_code}", response.status_code)
        return response.json()


def _with_row(parity: Parity, seal: Seal, row: SealedRow, endpoint: Endpoint) -> Parity:
    """`parity` with one more row. Raises CloudError."""
    failures: tuple[type[Exception], ...] = (*client_errors(), ValueError, LookupError, TypeError, AttributeError)
    try:
        found = compare_row(seal, row, endpoint)
    except Refused as refused:
        message, status = refused.args
        error_class = ErrorClass.PARITY if 400 <= status < 500 and status != 429 else ErrorClass.TRANSIENT
        raise CloudError(error_class, f"row {row.row} could not be compared: {message}", HINT) from None
    except failures as error:
        message = f"row {row.row} could not be compared: {type(error).__name__}"  # its text may repeat the answer
        raise CloudError(ErrorClass.TRANSIENT, message, HINT) from None
    if isinstance(found, Difference):
        raise _differs(str(found))
    tokens, farthest = parity.tokens + found.tokens, found.farthest
    worse = farthest.divergence > parity.farthest_divergence
    most = {"farthest": str(farthest), "farthest_divergence": farthest.divergence} if worse else {}
    return evolve(
        parity,
        **most,
        rows=parity.rows + 1,
        tokens=tokens,
        ties=parity.ties + found.ties,
        divergence=(parity.divergence * parity.tokens + found.divergence) / tokens,
    )


def compare_row(seal: Seal, row: SealedRow, endpoint: Endpoint) -> Agreement | Difference:
    """Ask and compare a row: first what the chat template made of it, then the probabilities, then the answer."""
    answer: list[int] | None = None
    if row.messages is not None:
        prompt, answer = endpoint.chat(row, **({} if seal.greedy else {"temperature": 0}))
        if difference := compare_prompt(row, prompt):
            return difference
    ids, found = endpoint.tokens(row)
    if ids != [*row.prompt, *row.answer]:
        raise Refused("/v1/completions read other token ids than were sent", BAD_ANSWER)
    agreement = compare_tokens(row, found, seal.tie)
    if isinstance(agreement, Difference):
        return agreement
    is_same = compare_answer(row, endpoint.greedy(row) if answer is None else answer, seal.tie)
    if isinstance(is_same, Difference):
        return is_same._replace(cause=_cause(agreement, seal, row, endpoint))
    return agreement if is_same else agreement._replace(ties=agreement.ties + 1)


def _cause(agreement: Agreement, seal: Seal, row: SealedRow, endpoint: Endpoint) -> str:
    """Why an endpoint that reads the same ids gives another answer.

    A further greedy request to the same ids tells a wrong default from a wrong computation.
    """
    mean = agreement.divergence / agreement.tokens
    if not mean < seal.limit:
        return cause_of_weights(mean)
    if isinstance(compare_answer(row, endpoint.greedy(row), seal.tie), Difference):
        return "the prefix cache, or how the engine decodes"
    return "the generation config: sampling defaults that the evaluation did not use"


def _differs(problem: str) -> CloudError:
    return CloudError(ErrorClass.PARITY, f"the endpoint does not answer as the exported model: {problem}", HINT)
