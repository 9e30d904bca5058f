"""A chat template that shows today's date always shows the date of the training, once it is exported."""

from __future__ import annotations

import re
import shutil
from datetime import date, datetime
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from containers.common import chat
from containers.common.errors import JobError
from containers.common.model import base_day
from containers.common.template_date import freeze, shows_today
from containers.common.training_template import training_tokenizer
from dropforge.run.artifacts import Source
from dropforge.spec.sections import Model

from ..names import DATA

DAY = date(2026, 11, 29)
# Without an import of TRL, which each process that collects the tests would do.
TEMPLATES = sorted(Path(file.locate()) for file in files("trl") or () if file.match("trl/chat_templates/*.jinja"))
# As in Llama 3.2, gpt-oss, Granite 3 and SmolLM3, and in Mistral Small 3 between quotes of the other kind.
SHOWN = {
    "{%- if strftime_now is defined %}{% set now = strftime_now('%d %b %Y') %}{% else %}{% set now = '26 Jul 2024' %}"
    "{% endif %}Today Date: {{ now }}": "Today Date: 29 Nov 2026",
    "{% if strftime_now is not defined %}no{% else %}{{ strftime_now(format='%Y-%m-%d') }}{% endif %}": "2026-11-29",
    '{{ "Today\'s Date: " + strftime_now("%B %d, %Y") + "." }}': "Today's Date: November 29, 2026.",
    '{%- set today = strftime_now ( "%d %B %Y" ) -%}\n{{ today }}': "29 November 2026",
    "{# strftime_now('%Y') #}{{ strftime_now('%Y') }}": "2026",
}


@pytest.fixture
def another_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day on which transformers renders."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(2031, 2, 3)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)


def rendered(template: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([[{"role": "user", "content": "hi"}]], chat_template=template)
    return str(text)


@pytest.mark.parametrize("template", SHOWN)
def test_a_frozen_template_shows_the_same_date_on_each_day(template: str, another_day: None) -> None:
    assert shows_today(template)
    assert re.search("2031|February", rendered(template))
    frozen = freeze(template, DAY)
    assert rendered(frozen) == SHOWN[template]
    assert not shows_today(frozen)


def test_the_templates_of_trl_show_no_other_date(another_day: None) -> None:
    texts = {path.stem: path.read_text() for path in TEMPLATES}
    dated = {name for name, text in texts.items() if shows_today(text)}
    assert {"gptoss", "llama3_2", "muse_glimmer"} <= dated
    for name in texts.keys() - dated:
        assert "strftime_now" not in texts[name]
    for name in dated:
        assert "strftime_now" not in freeze(texts[name], DAY), name


def test_each_template_of_a_tokenizer_is_frozen() -> None:
    several = {"default": "{{ strftime_now('%Y') }}", "tool_use": "tools"}
    assert shows_today(several)
    assert freeze(several, DAY) == {"default": '{{ "2026" }}', "tool_use": "tools"}
    assert not shows_today({"default": "none", "tool_use": "{# strftime_now #}"})


@pytest.mark.parametrize("use", ["strftime_now(form)", "strftime_now('%d' + form)", "strftime_now | string"])
def test_a_date_in_a_form_that_the_template_computes_is_refused(use: str) -> None:
    with pytest.raises(JobError, match="expected the form as a text, as in") as caught:
        freeze(f"{{% set form = '%Y' %}}{{{{ {use} }}}}", DAY)
    assert "model.chat_template" in caught.value.hint


def dated(base_model: Path, directory: Path) -> Path:
    """The tiny model's tokenizer, with a template that shows today's date."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(base_model / name, directory)
    template = (base_model / "chat_template.jinja").read_text()
    shown = "{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\\n' }}"
    (directory / "chat_template.jinja").write_text(template.replace("{{ bos_token }}", "{{ bos_token }}" + shown))
    return directory


def test_the_tokenizer_of_a_training_has_the_day_of_the_run(
    base_model: Path, tmp_path: Path, another_day: None
) -> None:
    directory, model = dated(base_model, tmp_path), Model(source="gs://bucket/model")
    tokenizer, shown = training_tokenizer(str(directory), model, lambda: DAY)
    assert shown == DAY
    prompt = chat.render(tokenizer, [{"role": "user", "content": "hi"}], for_answer=True)
    assert "Today Date: 29 Nov 2026\n" in prompt
    tokenizer.save_pretrained(tmp_path / "export")
    exported = chat.load_tokenizer(str(tmp_path / "export"), False)
    assert chat.render(exported, [{"role": "user", "content": "hi"}], for_answer=True) == prompt
    again = chat.load_tokenizer(str(directory), False, tokenizer.chat_template)
    assert again.chat_template == tokenizer.chat_template


def test_no_day_is_asked_for_if_no_date_is_shown(base_model: Path) -> None:
    def refuse() -> date:
        raise AssertionError

    tokenizer, shown = training_tokenizer(str(base_model), Model(source="gs://bucket/model"), refuse)
    assert (tokenizer.chat_template, shown) == ((base_model / "chat_template.jinja").read_text(), None)


def test_the_adapters_of_a_base_have_the_day_of_its_files(cloud: Any, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        cloud.put(DATA, f"{tmp_path.name}/{name}", "{}")
    newest = max(blob.updated for blob in cloud.client.list_blobs(DATA, prefix=f"{tmp_path.name}/"))
    assert base_day(cloud.client, Source(uri=f"gs://{DATA}/{tmp_path.name}", revision="sha256:0")) == newest.date()
