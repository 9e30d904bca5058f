"""The training methods: their names are the spec's, and every module has the functions of the protocol."""

from __future__ import annotations

import inspect
import json
import shutil
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from containers.common.errors import BAD_CONFIG, JobError
from containers.common.model import base_day
from containers.common.tokenise import Tokeniser
from containers.train_maxtext import methods as maxtext_methods
from containers.train_trl import methods as trl_methods
from containers.train_trl.methods import Method, load_method
from dropforge.run.artifacts import Source
from dropforge.spec import parse_spec
from dropforge.spec.methods import METHODS, method_of, trained_by

from ..conftest import DATA, job_spec
from ..lazy import Lazy

callbacks = Lazy("containers.train_trl.callbacks")
train = Lazy("containers.train_trl.train")


@pytest.mark.parametrize("name", METHODS)
def test_each_method_of_the_spec_is_in_the_images_of_its_trainers(name: str) -> None:
    images = {"trl": trl_methods, "maxtext": maxtext_methods}
    for trainer in method_of(name).trainers:
        assert (Path(str(images[trainer].__file__)).parent / f"{name}.py").exists()


@pytest.mark.parametrize("name", trained_by("trl"))
def test_a_method_has_the_functions_of_the_protocol(name: str) -> None:
    functions = {key: value for key, value in vars(Method).items() if inspect.isfunction(value) and key[0] != "_"}
    assert set(functions) == {"read_examples", "build_trainer", "evaluate", "metrics", "describe"}
    for key, function in functions.items():
        expected = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        assert list(inspect.signature(getattr(load_method(name), key)).parameters) == expected, key


def test_an_unknown_method_is_refused_with_the_known_methods() -> None:
    with pytest.raises(JobError, match=r"training\.method is 'dpo'; expected one of sft") as caught:
        load_method("dpo")
    assert caught.value.exit_code == BAD_CONFIG


def test_a_row_to_evaluate_on_is_named_by_its_own_data_set(
    cloud: Any, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template refuses a question of the other data set. Its rows have numbers of their own."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(base_model / name, tmp_path)
    refuse = "{% if 'unseen 3' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(refuse + (base_model / "chat_template.jinja").read_text())
    seen = [{"question": f"how many cars cost {n}", "context": "cars", "answer": f"select {n}"} for n in range(40)]
    unseen = [{**row, "question": f"unseen {n}"} for n, row in enumerate(seen[:8])]
    for name, rows in (("seen", seen), ("unseen", unseen)):
        cloud.put(DATA, f"{name}.jsonl", "\n".join(map(json.dumps, rows)))
    source = f"gs://{DATA}/unseen.jsonl"
    document = job_spec(dataset={"source": f"gs://{DATA}/seen.jsonl"}, evaluation={"source": source})
    tokeniser = Tokeniser.load(str(tmp_path), False, "sft", None)
    spec = parse_spec(json.dumps(document).encode())
    examples = load_method("sft").read_examples(spec, tokeniser, cloud.client, tmp_path / "data")
    assert examples.held_out is not None
    assert len(examples.split.held_out) == len(examples.held_out.lengths) == 7
    assert not [row for row in examples.split.held_out if "unseen 3" in row.content]
    assert f"left out 1 of 8 rows of {source}, which cannot be trained on. The first: row 3" in capsys.readouterr().err


def test_the_adapters_of_a_shared_endpoint_have_the_date_of_their_base(cloud: Any) -> None:
    """Any other date is the day of the run."""
    (own, shared), day = ({"ttl": "1h", "share": share} for share in (False, True)), date(2031, 2, 3)
    attempt = SimpleNamespace(job=SimpleNamespace(day=lambda client: day), client=cloud.client)
    base = Source(uri=f"gs://{DATA}/tiny", revision="sha256:0")

    def shown(serve: dict[str, Any] | None) -> date:
        endpoint = serve and {"type": "cloud_run", **serve}
        found: date = train.template_day(parse_spec(json.dumps(job_spec(serve=endpoint)).encode()), attempt, base)
        return found

    assert shown(own) == shown(None) == day
    assert shown(shared) == base_day(cloud.client, base) != day


def test_a_disk_holds_the_newest_checkpoint_and_the_one_before_it_while_that_is_uploaded(tmp_path: Path) -> None:
    """The plan counts two (fit/phases.py): the older ones are deleted once the bucket has them."""
    events: list[str] = []

    def listed() -> str:
        return " ".join(sorted(path.name for path in tmp_path.iterdir()))

    store = SimpleNamespace(
        wait=lambda: events.append(f"uploaded, beside {listed()}"),
        save=lambda step, local, notes: events.append(f"saves {step}, beside {listed()}"),
    )
    world = SimpleNamespace(sharded=False, first_here=True)
    uploads = callbacks.UploadCheckpoints(store, {}, world)
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = SimpleNamespace(global_step=step, max_steps=9)
        uploads.on_save(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    assert events == [
        "uploaded, beside checkpoint-1",
        "saves 1, beside checkpoint-1",
        "uploaded, beside checkpoint-1 checkpoint-2",
        "saves 2, beside checkpoint-2",
        "uploaded, beside checkpoint-2 checkpoint-3",
        "saves 3, beside checkpoint-3",
    ]


def test_the_metrics_count_the_rows_that_were_cut(tmp_path: Path) -> None:
    """The functions read this name (await_/inspect.py), and tell people if many rows were cut."""
    state = {"log_history": [{"loss": 0.5}], "num_input_tokens_seen": 900, "global_step": 3}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    examples = SimpleNamespace(
        lengths=[1] * 300, split=SimpleNamespace(held_out=[1] * 12), truncated=12, dropped=3, answers=(310, 305)
    )
    metrics = train.training_metrics(tmp_path, {"train_seconds": 3.0}, examples)
    assert (metrics["rows_truncated"], metrics["rows_train"], metrics["rows_eval"]) == (12, 300, 12)
    assert (metrics["rows_dropped"], metrics["answers_given"], metrics["answers_learnt"]) == (3, 310, 305)
