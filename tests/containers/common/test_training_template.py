"""A chat template of the spec: what it must be able to do, and that training, evaluation and export use it."""

from __future__ import annotations

import dataclasses
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from containers.common import chat
from containers.common.errors import BAD_CONFIG, JobError
from containers.common.tokenise import Tokeniser
from containers.common.training_template import training_tokenizer
from dropforge.rows import Row
from dropforge.spec.sections import Model

OWN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}### Answer: {{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}### {{ m.role | title }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Answer: {% endif %}"
)
ROW = Row(({"role": "user", "content": "how many cars are there"}, {"role": "assistant", "content": "select 1"}))


def made(base_model: Path, template: str) -> Any:
    model = Model(source="gs://bucket/model", chat_template=template)
    tokenizer, shown = training_tokenizer(str(base_model), model, lambda: date(2026, 11, 29))
    assert (shown is None) == ("strftime_now" not in template)
    return tokenizer


def test_prompts_and_answers_have_the_form_of_the_template_of_the_spec(base_model: Path) -> None:
    tokenizer = made(base_model, OWN)
    encoded = chat.encode(tokenizer, [ROW], 128, "x")
    assert tokenizer.decode(encoded.input_ids[0]) == (
        "<bos>### User: how many cars are there\n### Answer: select 1<end_of_turn>"
    )
    learnt = [label for label in encoded.labels[0] if label != chat.IGNORED]
    assert tokenizer.decode(learnt) == "select 1<end_of_turn>"


def test_the_processes_of_a_long_data_set_use_the_template_of_the_spec(base_model: Path) -> None:
    tokeniser = Tokeniser(made(base_model, OWN), str(base_model))
    rows = [ROW] * 8
    one, two = (dataclasses.replace(tokeniser, processes=count).encode(rows, 128, "x") for count in (1, 2))
    assert one == two
    assert "### Answer: " in tokeniser.tokenizer.decode(two.input_ids[0])
    other = Tokeniser.load(str(base_model), False, "sft", None)
    assert tokeniser.key(rows, 128) != other.key(rows, 128)


def test_a_date_in_the_template_of_the_spec_is_that_of_the_training(base_model: Path) -> None:
    tokenizer = made(base_model, "{{ strftime_now('%Y-%m-%d') }} " + OWN)
    assert chat.render(tokenizer, ROW.prompt).startswith("2026-11-29 <bos>### User")


TURNS = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
START = "{% for m in messages %}{{ '[BOT]' if m.role == 'assistant' }}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('no') }}", "fails to render a question and an answer: TemplateError: no"),
        ("{{ messages[7].content.upper() }}", "fails to render a question and an answer: UndefinedError"),
        ("{{ messages.append(1) }}", "fails to render a question and an answer: SecurityError"),
        ("{% for n in range(10 ** 9) %}{% endfor %}", "fails to render a question and an answer: OverflowError"),
        ("{{ messages | nothing }}", "fails to render a question and an answer: TemplateAssertionError"),
        ("{{ messages[-1].content if messages[1] }}{{ eos_token }}", "leaves out the question of a user"),
        ("{{ messages[0].content }}{{ eos_token }}", "leaves out the answer of the assistant"),
        (
            TURNS.replace("{{ eos_token if m.role == 'assistant' }}", "\n"),
            "does not end an answer with a special token",
        ),
        (START, "ignores add_generation_prompt, and begins an answer with '[BOT]'"),
    ],
)
def test_a_template_that_no_model_could_learn_is_refused(base_model: Path, template: str, problem: str) -> None:
    with pytest.raises(JobError) as caught:
        made(base_model, template)
    assert caught.value.message.startswith(f"model.chat_template {problem}")
    assert caught.value.exit_code == BAD_CONFIG


def test_a_template_without_a_start_of_the_answer_is_taken(base_model: Path) -> None:
    assert chat.render(made(base_model, TURNS), ROW.messages) == "how many cars are thereselect 1<end_of_turn>"


def test_a_template_that_writes_empty_thoughts_is_taken(base_model: Path) -> None:
    """As Qwen 3's, in whose prompts an answer begins with the role alone."""
    think = "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    template = think + "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    assert chat.render(made(base_model, template), ROW.prompt, for_answer=True).endswith("[assistant]")
