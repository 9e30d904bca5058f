"""The batches of an evaluation, whose memory has a bound that does not depend on the data, and its exact match."""

from __future__ import annotations

from typing import Any

import pytest

from containers.common import chat
from containers.common.evaluation import _generation_batches, evaluate
from dropforge.fit.phases import GENERATION_ROWS, GENERATION_TOKENS
from dropforge.rows import Row

from .. import same_class
from ..conftest import ROOT


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([10] * 130, [64, 64, 2]),
        ([16_384] * 3, [2, 1]),
        ([100, 40_000], [1, 1]),  # a row is never divided
        ([500] * 64, [64]),
        ([513] * 64, [63, 1]),
        ([], []),
    ],
)
def test_a_generation_holds_a_bounded_number_of_rows_and_tokens(lengths: list[int], sizes: list[int]) -> None:
    batches = list(_generation_batches(lengths))
    assert [len(batch) for batch in batches] == sizes
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= GENERATION_ROWS
        assert len(batch) == 1 or len(batch) * lengths[batch[-1]] <= GENERATION_TOKENS


@pytest.mark.slow
def test_the_thoughts_that_a_template_writes_are_no_part_of_the_answer() -> None:
    """Qwen 3's template puts empty thoughts before each answer, so that a model which learnt an answer writes them."""
    base = str(same_class.make(ROOT / "build" / "same_class", "qwen3"))
    tokenizer = chat.load_tokenizer(base, trust_remote_code=False)
    question = {"role": "user", "content": "How many orders have amount above 7?"}
    row = Row((question, {"role": "assistant", "content": "SELECT COUNT(*) FROM orders"}))
    encoded = chat.encode(tokenizer, [row], 512, "x")
    model = learn(base, encoded.input_ids[0], encoded.labels[0])
    score = evaluate(model, tokenizer, [row], encoded, max_new_tokens=40)
    assert "</think>" in tokenizer.decode([label for label in encoded.labels[0] if label != chat.IGNORED])
    assert (score.answers, score.exact_match) == (["SELECT COUNT(*) FROM orders"], 1.0)


def learn(base: str, ids: list[int], labels: list[int]) -> Any:
    """The model of the directory `base`, trained on a single row until it knows the answer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = model(input_ids=torch.tensor([list(ids)]), labels=torch.tensor([list(labels)])).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model
