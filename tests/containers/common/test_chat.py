"""Token ids: training sees exactly the prompts of serving, and learns the answers and the token that ends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from containers.common import chat
from containers.common.errors import JobError
from dropforge.rows import Message, Row


@pytest.fixture(scope="module")
def tokenizer(base_model: Path) -> Any:
    return chat.load_tokenizer(str(base_model), trust_remote_code=False)


@pytest.fixture
def bare(base_model: Path) -> Any:
    """The tokenizer of a base model without a chat template, which pads with the end of sequence."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.chat_template = None
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def talk(*turns: str) -> Row:
    roles = ("user", "assistant")
    return Row(tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(turns)))


def learnt(tokenizer: Any, row: Row, learn: chat.Learn = "answers") -> list[str]:
    """The parts of a row's sequences that have a loss."""
    encoded = chat.encode(tokenizer, [row], 512, "x", learn)
    parts: list[list[int]] = []
    for labels in encoded.labels:
        parts.append([])
        for label in labels:
            if label == chat.IGNORED:
                parts.append([])
            else:
                parts[-1].append(label)
    return [tokenizer.decode(part) for part in parts if part]


QUESTION = "Question: how many cars are there\nContext: CREATE TABLE cars (price INT)"


def test_only_the_answer_and_its_end_are_learnt(tokenizer: Any) -> None:
    assert learnt(tokenizer, talk(QUESTION, "select count(*)")) == ["select count(*)<end_of_turn>"]


def test_every_answer_of_a_conversation_is_learnt(tokenizer: Any) -> None:
    row = talk(QUESTION, "select 1", "and how many of the books are there", "select 2")
    assert learnt(tokenizer, row) == ["select 1<end_of_turn>", "select 2<end_of_turn>"]


def test_an_answer_of_weight_zero_is_read_and_not_learnt(tokenizer: Any) -> None:
    whole = talk(QUESTION, "select 1", "and how many of the books are there", "select 2")
    row = replace(whole, muted=frozenset({1}))
    assert learnt(tokenizer, row) == ["select 2<end_of_turn>"]
    assert chat.encode(tokenizer, [row], 512, "x").input_ids == chat.encode(tokenizer, [whole], 512, "x").input_ids


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\n\n</think>\n\nSELECT 1", "SELECT 1"),
        (" <think>a column\nis missing</think> SELECT 1 ", "SELECT 1"),
        ("<think>the limit came before the end of the thou", ""),
        ("SELECT '<think>' FROM words", "SELECT '<think>' FROM words"),
        ("", ""),
    ],
)
def test_thoughts_are_not_the_answer(text: str, answer: str) -> None:
    assert chat.visible_answer(text) == answer


def test_the_prompt_of_a_training_row_is_the_one_that_serving_makes(tokenizer: Any) -> None:
    row = talk(QUESTION, "select count(*)")
    ids = chat.encode(tokenizer, [row], 512, "x").input_ids[0]
    served = tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[: len(served)] == list(served)


def test_a_template_that_forgets_earlier_turns_gets_a_sequence_for_each_answer(tokenizer: Any, bare: Any) -> None:
    bare.chat_template = "{% for m in messages[-2:] %}" + chat.MINIMAL_TEMPLATE.split("{% for message in messages %}")[
        1
    ].replace("message[", "m[")
    row = talk(QUESTION, "select 1", "and how many of the books are there", "select 2")
    assert learnt(bare, row) == ["select 1<end_of_turn>", "select 2<end_of_turn>"]
    encoded = chat.encode(bare, [row], 512, "x")
    assert (list(encoded.rows), encoded.given, encoded.learnt) == ([0, 0], 2, 2)


def test_the_last_answer_alone_or_the_prompts_too_are_learnt_if_the_spec_says_so(tokenizer: Any) -> None:
    row = talk(QUESTION, "select 1", "and how many of the books are there", "select 2")
    assert learnt(tokenizer, row, "last_answer") == ["select 2<end_of_turn>"]
    last = chat.encode(tokenizer, [row], 512, "x", "last_answer")
    assert (last.given, last.learnt) == (1, 1)
    whole = chat.encode(tokenizer, [row], 512, "x", "all")
    assert whole.labels == whole.input_ids == chat.encode(tokenizer, [row], 512, "x").input_ids
    (text,) = learnt(tokenizer, replace(row, muted=frozenset({1})), "all")[:1]
    assert QUESTION in text
    assert "select 1" not in "".join(learnt(tokenizer, replace(row, muted=frozenset({1})), "all"))


def test_the_tokens_of_a_whole_row_are_those_of_trl(tokenizer: Any) -> None:
    """TRL with completion_only_loss=False learns all tokens of the rendered row, also those after the last turn."""
    row = talk(QUESTION, "select 1")
    rendered = tokenizer.apply_chat_template(list(row.messages), tokenize=False)
    encoded = chat.encode(tokenizer, [row], 512, "x", "all")
    (ids,) = (list(ids) for ids in encoded.labels)
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"][: len(ids)]
    assert tokenizer.decode(ids) == rendered.rstrip()


def test_each_token_of_a_prompt_is_learnt_once_in_the_sequences_of_a_conversation(bare: Any) -> None:
    """The template renders an earlier answer in another way, so that each answer has a sequence of its own."""
    shown = "{{ m['content'] if m['role'] == 'user' or loop.last else 'answered' }}"
    bare.chat_template = (
        "{% for m in messages %}" + shown + "{{ '\\n' if m['role'] == 'user' else eos_token }}{% endfor %}"
    )
    row = talk(QUESTION, "select 1", "and how many of the books are there", "select 2")
    first, second = chat.encode(bare, [row], 512, "x", "all").labels
    assert bare.decode(list(first)).startswith(QUESTION)
    rest = [label for label in second if label != chat.IGNORED]
    assert QUESTION not in bare.decode(rest)
    assert bare.decode(rest).endswith(f"and how many of the books are there\nselect 2{bare.eos_token}")


def test_plain_text_is_learnt_whole_and_ends(tokenizer: Any) -> None:
    text = "select the price of all the cars from the table of cars"
    assert learnt(tokenizer, Row((), text)) == [f"{text}<end_of_turn>"]


def test_a_base_model_without_template_gets_a_minimal_one(bare: Any, tmp_path: Path) -> None:
    bare.save_pretrained(tmp_path)
    loaded = chat.load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert loaded.chat_template == chat.MINIMAL_TEMPLATE
    assert loaded.pad_token == "<pad>"
    messages: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert chat.render(loaded, messages) == "<bos>q\na<end_of_turn>\n"
    assert chat.render(loaded, messages[:1], for_answer=True) == "<bos>q\n"


def test_an_answer_that_merges_with_its_prompt_keeps_the_prompt_of_serving(bare: Any) -> None:
    # "employ" + "ees": the whole text would tokenise across the border.
    bare.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    row = talk("Question: how many are there of the table of employ", "ees in it")
    served = chat.encode_prompt(bare, row.prompt)
    ids = chat.encode(bare, [row], 512, "x").input_ids[0]
    assert bare(chat.render(bare, list(row.messages)))["input_ids"][: len(served)] != served
    assert ids[: len(served)] == served
    assert ids[-1] == bare.eos_token_id


def test_the_end_of_turn_is_found_in_the_template(tokenizer: Any, bare: Any) -> None:
    assert chat.end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<end_of_turn>")
    bare.eos_token = "<eos>"
    bare.chat_template = tokenizer.chat_template
    assert chat.end_of_turn(bare) == tokenizer.convert_tokens_to_ids("<end_of_turn>")
    bare.chat_template = "{% for m in messages %}{{ m['content'] + '\\n' }}{% endfor %}"
    assert chat.end_of_turn(bare) == tokenizer.convert_tokens_to_ids("<eos>")


def test_answers_stop_at_the_end_of_turn_first(tokenizer: Any) -> None:
    class Config:
        eos_token_id = [1, 5]

    assert chat.stop_ids(tokenizer, Config) == [5, 1]


def test_short_rows_are_refused_with_their_mean(tokenizer: Any) -> None:
    rows = [talk(f"cars {n}", "1") for n in range(20)]
    with pytest.raises(JobError, match=r"have \d\.\d tokens on average; expected at least 8") as caught:
        chat.encode(tokenizer, rows, 128, "gs://data/x.jsonl")
    assert "cars" not in str(caught.value)


def test_rows_that_are_too_long_are_refused_with_the_longest(tokenizer: Any) -> None:
    rows = [talk(QUESTION * (1 + 5 * (n % 2)), "select 1") for n in range(20)]
    with pytest.raises(JobError, match=r"10 of 20 rows .* \(50%\) are longer than training.max_length 64.*longest"):
        chat.encode(tokenizer, rows, 64, "gs://data/x.jsonl")


def test_a_few_long_rows_are_cut_and_those_without_an_answer_left_are_dropped(tokenizer: Any) -> None:
    rows = [talk(QUESTION * (1 + 9 * (n == 3)), "select 1") for n in range(20)]
    encoded = chat.encode(tokenizer, rows, 64, "x")
    assert (encoded.truncated, encoded.dropped, len(encoded.input_ids)) == (1, 1, 19)
    assert max(encoded.lengths) <= 64
