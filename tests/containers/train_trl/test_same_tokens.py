"""The token ids and labels are those of TRL's own trainer, for each form that it knows and each of its chat templates.

What differs on purpose is listed here. One difference is everywhere: TRL also learns what a template writes after the
token that ends an answer, such as a line break; dropforge stops at that token, as serving does.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from containers.common import chat
from containers.common.errors import JobError
from containers.common.rows import normalise
from containers.common.training_template import check_own
from dropforge.rows import Row
from dropforge.spec import Dataset

from ..lazy import Lazy

datasets, trl = Lazy("datasets"), Lazy("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

QUESTION = [{"role": "user", "content": "how many cars are there"}]
ANSWER = [{"role": "assistant", "content": "select count"}]
TALK = [*QUESTION, *ANSWER, {"role": "user", "content": "and books"}, {"role": "assistant", "content": "select 2"}]
# The template writes an empty thought before an answer that has none, but the prompt of serving begins a thought. So
# TRL's prompt is one that no server sends.
BEGINS_A_THOUGHT = (
    "deepseek_r1_distill", "deepseekv3",
    "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
)  # fmt: skip
ENDS_NO_ANSWER = ("glm4moe",)  # the template ends an answer by the next turn, so TRL teaches no end
TAKES_NO_TEXT = ("idefics3", "llava_next", "smolvlm")  # templates for lists of parts, which lose plain text
TOKEN = re.compile(r"<[^<>\s'\"{}]{2,40}>|\[/?[A-Z_]+\]")


def templates() -> dict[str, Path]:
    from importlib.util import find_spec

    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    files = (Path(found.origin).parent / "chat_templates").glob("*.jinja")
    return {path.stem: path for path in sorted(files) if not path.stem.endswith("_training")}


def tokenizer_with(template: str, base: Path) -> Any:
    """The tiny tokenizer with a template, and with all tokens that the template writes as special ones."""
    tokenizer = chat.load_tokenizer(str(base), False, template)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(TOKEN.findall(template)))})
    return tokenizer


def trl_s(tokenizer: Any, rows: list[dict[str, Any]], directory: Path, **settings: Any) -> tuple[list[int], list[int]]:
    """The token ids and the labels of the first row, by TRL's trainer."""
    template = trl.chat_template_utils.get_training_chat_template(tokenizer) if settings else None
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=True)
    config = trl.SFTConfig(output_dir=str(directory), max_length=None, use_cpu=True, bf16=False, **settings)
    data = datasets.Dataset.from_list(rows)
    made = trl.SFTTrainer._prepare_dataset(trainer, data, tokenizer, config, False, None, "train")
    return made[0]["input_ids"], made[0]["labels"]


def ours(tokenizer: Any, row: Row) -> tuple[list[int], list[int]]:
    encoded = chat.encode(tokenizer, [row], 4096, "rows")
    return list(encoded.input_ids[0]), list(encoded.labels[0])


@pytest.mark.parametrize("name", sorted(templates()))
def test_a_template_gives_the_tokens_of_trl(name: str, base_model: Path, tmp_path: Path) -> None:
    tokenizer, row = tokenizer_with(templates()[name].read_text(), base_model), Row((*QUESTION, *ANSWER))
    if name in TAKES_NO_TEXT:
        with pytest.raises(JobError, match=r"the model's own chat template (leaves out the question|fails to render)"):
            check_own(tokenizer)
        return
    check_own(tokenizer)
    ids, labels = ours(tokenizer, row)
    expected, learnt = trl_s(tokenizer, [{"prompt": QUESTION, "completion": ANSWER}], tmp_path)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt
    if name in BEGINS_A_THOUGHT:
        assert expected[: len(prompt)] != prompt
        assert tokenizer.decode([label for label in labels if label != chat.IGNORED]).startswith("select count")
    elif name in ENDS_NO_ANSWER:
        assert (ids[:-1], labels[:-1]) == (expected, learnt)
    else:
        assert (ids, labels) == (expected[: len(ids)], learnt[: len(ids)])
        assert set(tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)) <= {"\n"}


LEARN = {"assistant_only_loss": True}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"text": "how many cars are there select count of the books"}, {}),
    "messages": ({"messages": TALK}, LEARN),
    "conversations": ({"conversations": [{"from": each["role"], "value": each["content"]} for each in TALK]}, LEARN),
    "prompt_completion": ({"prompt": TALK[:-1], "completion": TALK[-1:]}, {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_gives_the_tokens_of_trl(form: str, tmp_path: Path, base_model: Path) -> None:
    raw, settings = FORMS[form]
    tokenizer = tokenizer_with(templates()["qwen2_5"].read_text(), base_model)
    row = normalise([raw] * 8, Dataset(source="gs://data/x.jsonl")).rows[0]
    ids, labels = ours(tokenizer, row)
    expected, learnt = trl_s(tokenizer, [raw], tmp_path, **settings)
    line_break = {place for place, token in enumerate(ids) if tokenizer.decode([token]) == "\n"}
    different = {place for place, pair in enumerate(zip(labels, learnt, strict=False)) if pair[0] != pair[1]}
    if form == "text":  # the last token is the end of a turn here, and of a text in TRL
        different -= {len(ids) - 1}
        ids, expected = ids[:-1], expected[:-1]
    assert ids == expected[: len(ids)]
    assert different <= line_break
    assert set(tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)) <= {"\n"}
