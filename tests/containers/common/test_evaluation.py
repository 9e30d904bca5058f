"""The batches of an evaluation, whose memory has a bound that does not depend on the data, and its exact match."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from containers.common import chat
from containers.common.evaluation import _generation_batches, answer_limit, evaluate
from dropforge.fit.phases import ANSWER_TOKENS, GENERATION_ROWS, GENERATION_TOKENS
from dropforge.rows import Row
from dropforge.spec import JobSpec, parse_spec

from .. import same_class
from ..conftest import ROOT, job_spec


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


def test_a_judged_answer_may_be_as_long_as_the_longest_held_out_one(base_model: Path) -> None:
    tokenizer = chat.load_tokenizer(str(base_model), trust_remote_code=False)
    question = {"role": "user", "content": "how many cars are there in the city?"}
    rows = [Row((question, {"role": "assistant", "content": "select price " * count})) for count in (1, 3, 9)]
    encoded = chat.encode(tokenizer, rows, 512, "x")
    sizes = [sum(label != chat.IGNORED for label in labels) for labels in encoded.labels]
    assert answer_limit(spec(), tokenizer, rows, encoded) == (max(sizes), 0)
    # The token that ends an answer need not fit a limit.
    assert answer_limit(spec(max_new_tokens=sizes[1] - 1), tokenizer, rows, encoded) == (sizes[1] - 1, 1)
    assert answer_limit(spec(max_new_tokens=sizes[1] - 2), tokenizer, rows, encoded) == (sizes[1] - 2, 2)
    long = [Row((question, {"role": "assistant", "content": "select price " * 2000}))]
    assert answer_limit(spec(), tokenizer, long, chat.encode(tokenizer, long, 9000, "x")) == (ANSWER_TOKENS, 1)
    assert answer_limit(spec(), tokenizer, [], None) == (0, 0)


def spec(**evaluation: Any) -> JobSpec:
    return parse_spec(json.dumps({**job_spec(), "evaluation": evaluation}).encode())


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
