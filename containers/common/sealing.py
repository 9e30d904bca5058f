"""Makes the parity seal of an exported model (dropforge/run/seal.py). Imports torch where it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dropforge.rows import Row
from dropforge.run import seal
from dropforge.run.seal import Distribution, Noise, Seal, SealedRow
from dropforge.spec import JobSpec

from .chat import encode_prompt, stop_ids
from .errors import finite
from .evaluation import generate_ids

DECIMALS = 6


def write_seal(
    directory: Path,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    spec: JobSpec,
    links: dict[str, float],
    count: int = seal.ROWS,
) -> Seal | None:
    """Write seal.json into `directory`, for up to `count` rows that fit; None if no row fits.

    `model` is the exported model, loaded from its files as a server loads it. It is of no further use: the noise is
    measured in 16 bits, because a server may compute a model of 32 bits in 16.
    """
    made = make_seal(model, tokenizer, rows, spec, links, count)
    if made is not None:
        (directory / seal.SEAL).write_text(made.model_dump_json(), encoding="utf-8")
    return made


def make_seal(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    spec: JobSpec,
    links: dict[str, float] | None = None,
    count: int = seal.ROWS,
) -> Seal | None:
    """Ask the model for its greedy answers and the probabilities of their tokens, with two attention kernels.

    See `write_seal`.
    """
    model.eval()
    prompts = _prompts(tokenizer, rows, spec, count)
    if not prompts:
        return None
    ids = generate_ids(model, tokenizer, [prompt for _, prompt in prompts], seal.ANSWER_TOKENS)
    stops = set(stop_ids(tokenizer, model.generation_config))
    answers = [_until(stops, answer) for answer in ids]
    pairs = [(prompt, answer) for (_, prompt), answer in zip(prompts, answers, strict=True)]
    dtype = str(model.dtype).removeprefix("torch.")
    usual, other = distributions(model, pairs), with_other_kernel(model, pairs)
    sealed = [
        SealedRow(
            row=number,
            messages=_messages(rows[number - 1]),
            prompt=prompt,
            answer=answer,
            top=[(list(each), list(each.values())) for each in found],
        )
        for (number, prompt), answer, found in zip(prompts, answers, usual, strict=True)
    ]
    return Seal(
        dtype=dtype,
        greedy=spec.serve is None or spec.serve.sampling == "greedy",
        rows=sealed,
        noise=noise(usual, other),
        links=links or {},
    )


def distributions(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[Distribution]]:
    """For each prompt with its answer: the likeliest tokens at each token of the answer, given all tokens before it."""
    import torch

    result: list[list[Distribution]] = []
    for prompt, answer in pairs:
        ids = torch.tensor([[*prompt, *answer]], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            best = logits.float().log_softmax(-1).topk(min(seal.TOP, logits.shape[-1]))
        finite(float(best.values.sum()), "the sum of the log-probabilities of the exported model's answer")
        result.append(
            [
                dict(zip(row, (round(value, DECIMALS) for value in values), strict=True))
                for row, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        )
    return result


def with_other_kernel(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[Distribution]]:
    """`distributions` with another attention kernel in 16 bits: what differs is rounding. Rounds the weights.

    Buffers stay as they are: a server that loads the weights in 16 bits has the rotary frequencies in 32 bits.
    """
    import torch

    if model.dtype not in (torch.bfloat16, torch.float16):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    with other_kernel(model):
        return distributions(model, pairs)


@contextmanager
def other_kernel(model: Any) -> Iterator[None]:
    """Compute the model's attention with the other of PyTorch's fused kernel and the plain kernel."""
    chosen = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if chosen == "eager" else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


def noise(usual: Sequence[Sequence[Distribution]], other: Sequence[Sequence[Distribution]]) -> Noise:
    """The noise between two measurements of the same tokens."""
    tokens = [pair for row in zip(usual, other, strict=True) for pair in zip(*row, strict=True)]
    gaps = [abs(_lead(one, one) - _lead(one, two)) for one, two in tokens]
    return Noise(
        divergence=sum(seal.divergence(one, two) for one, two in tokens) / len(tokens),
        gap=max(gaps),
    )


def _lead(reference: Distribution, of: Distribution) -> float:
    """The difference between the two tokens that are the best by `reference`."""
    first, second, *_ = [*reference, *reference]
    most = seal.unlisted(of)
    return of.get(first, most) - of.get(second, most)


def _messages(row: Row) -> list[dict[str, str]] | None:
    """The messages that the chat route is asked with; None for plain text, and for a row with tools or thoughts."""
    return [dict(message) for message in row.prompt] if row.messages and row.is_plain else None


def _prompts(tokenizer: Any, rows: Sequence[Row], spec: JobSpec, count: int) -> list[tuple[int, list[int]]]:
    """The numbers and prompts of the first rows that leave room for an answer, in the seal and at the endpoint."""
    room = min(seal.ROW_TOKENS, spec.serve.max_model_len - 1 if spec.serve else seal.ROW_TOKENS) - seal.ANSWER_TOKENS
    prompts = []
    for number, row in enumerate(rows, 1):
        # Plain text has no prompt: its first half stands for it.
        text = [] if row.messages else list(tokenizer(row.text)["input_ids"])
        prompt = encode_prompt(tokenizer, row.prompt, row.tools) if row.messages else text[: max(1, len(text) // 2)]
        if 0 < len(prompt) <= room:
            prompts.append((number, prompt))
        if len(prompts) == count:
            break
    return prompts


def _until(stops: set[int], answer: list[int]) -> list[int]:
    """The answer with its first stop token, without the padding after it."""
    end = next((index + 1 for index, token in enumerate(answer) if token in stops), len(answer))
    return answer[:end]
