"""The training container as a subprocess: its artifacts, its exit codes, and how an attempt continues after a kill."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from google.cloud import storage
from tests.patience import TRAIN_SECONDS

from dropforge.base.errors import ErrorClass
from dropforge.run.artifacts import (
    COMPLETE,
    checkpoints,
    complete_checkpoint,
    download_prefix,
    read_artifact,
    upload_directory,
    verify_manifest,
)
from dropforge_cli.main import cli

from ..conftest import RUN_KEY

# A test waits for several attempts: its own, and attempts that tests share.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

CANARY = "canary-4f1a-not-a-known-prefix"
TOKEN_CANARY = "hf_" + "c" * 30
RUNS, DATA = "runs-bucket", "data-bucket"
# Enough steps to interrupt, and the same steps in every test that compares with an uninterrupted run.
LONG = {"max_steps": 40, "checkpoint_steps": 20}
# Same data order, same seeds, one thread: only the rounding of sums differs after a resume.
LOSS_TOLERANCE = 1e-4

Spec = Callable[..., dict[str, Any]]


def test_a_lora_run_leaves_a_committed_model_that_learnt(uninterrupted: Any, cloud: Any, trainer: Any) -> None:
    attempt, manifest = uninterrupted
    metrics = manifest.metrics
    assert verify_manifest(cloud.client, RUNS, manifest) == []
    assert metrics["exact_match_before"] == 0
    assert metrics["exact_match"] >= 0.5
    assert metrics["loss"] < metrics["loss_before"] / 2
    assert (metrics["steps"], metrics["rows_eval"]) == (40, 35)
    assert metrics["tokens"] == pytest.approx(40 * 16 * 50, rel=0.2)
    assert metrics["rows_per_step"] == 16
    assert metrics["saved_to_reloaded"] == 0
    assert metrics["adapter_to_merged"] < 5e-4
    assert metrics["tokens_per_step"] == pytest.approx(metrics["tokens"] / 40, abs=0.1)
    assert '"rows_per_step": 16, "tokens_per_step": ' in attempt.output
    card = read_artifact(cloud.client, RUNS, manifest, "README.md").decode()
    assert "| rows_per_step | 16 |" in card
    paths = {file.path for file in manifest.files}
    assert {f"attempt-1/model/{name}" for name in MODEL_FILES} <= paths
    assert {"attempt-1/adapter/adapter_model.safetensors", "attempt-1/README.md"} <= paths
    assert manifest.base.uri == f"gs://{DATA}/tiny"
    assert manifest.base.revision.startswith("sha256:")


MODEL_FILES = ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json")


def test_the_spec_that_init_writes_teaches_rows_of_no_known_language(
    cloud: Any, trainer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "animals.csv").write_text("\n".join(["animal,sound", *animals()]))
    options = ["--data", "animals.csv", "--answer", "sound", "--model", "gs://local-data/tiny-gemma3", "--no-serve"]
    written = CliRunner().invoke(cli, ["init", "job.json", "--target", "cloud_run", *options])
    assert written.exit_code == 0, written.output
    cloud.put(DATA, "animals.csv", (tmp_path / "animals.csv").read_bytes())
    document = json.loads((tmp_path / "job.json").read_text())
    document["model"]["source"], document["dataset"]["source"] = f"gs://{DATA}/tiny", f"gs://{DATA}/animals.csv"
    attempt = trainer.start(document)
    assert attempt.wait() == 0, attempt.output
    metrics = trainer.manifest(attempt.run).metrics
    assert metrics["exact_match_before"] == 0
    assert metrics["exact_match"] >= 0.8


def animals() -> list[str]:
    sounds = {"owl": "hoot", "duck": "quack", "cow": "moo", "cat": "meow", "dog": "woof", "sheep": "baa"}
    colours, places = ("white", "brown", "old", "small", "sleepy"), ("at night", "by the river", "near the barn")
    everything = itertools.product(colours, sounds, places)
    rows = [f"the {colour} {animal} {place},{sounds[animal]}" for colour, animal, place in everything]
    return [f"{start}{row}" for start in ("", "look at ") for row in rows]


def test_the_exported_model_stops_at_the_end_of_a_turn_and_answers_as_the_samples_say(
    uninterrupted: Any, cloud: Any, trainer: Any, tmp_path: Any
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    attempt, manifest = uninterrupted
    download_prefix(cloud.client, f"gs://{RUNS}/models/{attempt.run}/{manifest.serve_path}", tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id[0] == tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert not (tmp_path / "adapter_config.json").exists()
    samples = trainer.samples(attempt.run)
    assert len(samples) == 5
    for sample in samples:
        inputs = tokenizer.apply_chat_template(
            sample["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(output, skip_special_tokens=True).strip() == sample["after"]


def test_events_tell_the_run_in_order_and_the_series_its_progress(uninterrupted: Any, events: Any, series: Any) -> None:
    attempt, manifest = uninterrupted
    sent = events(attempt.run)
    kinds = [event.type for event in sent]
    assert kinds[0] == "started"
    assert "succeeded" in kinds[-2:]  # the upload of the last checkpoint may end later
    assert kinds.count("checkpoint") == 2
    assert "progress" not in kinds
    progress = series(attempt.run)
    assert progress.step == sorted(set(progress.step))
    assert progress.step[-1] == progress.total_steps == 40
    assert progress.loss[-1] < 0.4
    held_out = [loss for loss in progress.held_out_loss if loss is not None]
    assert len(held_out) >= 3
    assert held_out[-1] < held_out[0]
    assert held_out[-1] == pytest.approx(manifest.metrics["loss"], rel=0.1)  # of 35 rows, the curve's are 32
    (succeeded,) = [event for event in sent if event.type == "succeeded"]
    assert succeeded.manifest_uri == f"gs://{RUNS}/models/{attempt.run}/MANIFEST.json"
    assert succeeded.metrics == manifest.metrics


def test_no_secret_is_in_a_log_an_event_or_an_artifact(uninterrupted: Any, cloud: Any, events: Any) -> None:
    attempt, _ = uninterrupted
    everything = attempt.output + "".join(event.model_dump_json() for event in events(attempt.run))
    for blob in cloud.client.list_blobs(RUNS):
        if attempt.run in blob.name:
            everything += blob.download_as_bytes().decode("latin-1")
    assert CANARY not in everything
    assert TOKEN_CANARY not in everything


def test_a_committed_run_is_told_again_and_not_trained_again(uninterrupted: Any, trainer: Any, events: Any) -> None:
    attempt, manifest = uninterrupted
    again = trainer.start({"not": "even a spec"}, run=attempt.run, attempt=2)
    assert again.wait() == 0, again.output
    sent = [event for event in events(attempt.run) if event.attempt == 2]
    assert [event.type for event in sent] == ["succeeded"]
    assert trainer.manifest(attempt.run) == manifest


def test_sigkill_and_resume_end_with_the_same_loss(
    uninterrupted: Any, trainer: Any, spec: Spec, cloud: Any, events: Any
) -> None:
    _, expected = uninterrupted
    first = trainer.start(spec(training=LONG))
    wait_for_object(first, f"checkpoints/{first.run}/step-00000020/{COMPLETE}")
    first.kill(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    # An incomplete upload is newer than the complete checkpoints; no attempt may resume it.
    cloud.put(RUNS, f"checkpoints/{first.run}/step-00000059/trainer_state.json", "{}")
    second = trainer.start(spec(training=LONG), run=first.run, attempt=2)
    assert second.wait() == 0, second.output
    assert "tokenised" in first.output
    assert "tokenised" not in second.output
    assert second.output.count("read the token ids of an earlier attempt") == 2  # to train on, and held out
    sent = [event for event in events(first.run) if event.attempt == 2]
    assert sent[0].resumed_step in (20, 40)
    assert_same(trainer.manifest(first.run).metrics, expected.metrics)
    assert trainer.manifest(first.run).serve_path == "attempt-2/model"


def test_sigterm_saves_a_checkpoint_and_the_next_attempt_goes_on(
    uninterrupted: Any, trainer: Any, spec: Spec, cloud: Any, events: Any
) -> None:
    _, expected = uninterrupted
    first = trainer.start(spec(training=LONG))
    # In the second epoch: the next attempt must train exactly the rows that remain of it.
    wait_for_object(first, f"checkpoints/{first.run}/step-00000020/{COMPLETE}")
    first.kill(signal.SIGTERM)
    assert first.wait() == 75, first.output
    last = events(first.run)[-1]
    assert last.type == "preempted"
    assert 20 < last.step < 40
    assert checkpoints(cloud.client, RUNS, first.run, RUN_KEY)[0].step == last.step
    second = trainer.start(spec(training=LONG), run=first.run, attempt=2)
    assert second.wait() == 0, second.output
    assert_same(trainer.manifest(first.run).metrics, expected.metrics)
    # Of three checkpoints, the two newest are kept.
    assert [checkpoint.step for checkpoint in checkpoints(cloud.client, RUNS, first.run, RUN_KEY)] == [40, last.step]


def test_a_finished_checkpoint_is_exported_without_another_step(
    uninterrupted: Any, trainer: Any, spec: Spec, cloud: Any, events: Any
) -> None:
    _, expected = uninterrupted
    run = copy_checkpoints(cloud.client, uninterrupted[0].run)
    attempt = trainer.start(spec(training=LONG), run=run)
    assert attempt.wait() == 0, attempt.output
    assert_same(trainer.manifest(run).metrics, expected.metrics)
    sent = events(run)
    assert sent[0].resumed_step == 40
    assert [event.type for event in sent] == ["started", "succeeded"]


def test_the_deadline_stops_training_with_a_checkpoint(trainer: Any, spec: Spec, cloud: Any, events: Any) -> None:
    deadline = time.time() + 30 + 9  # the margin, and time to start
    attempt = trainer.start(spec(training={"max_steps": 5000}), DROPFORGE_DEADLINE=str(deadline))
    assert attempt.wait() == 75, attempt.output
    last = events(attempt.run)[-1]
    assert (last.type, last.error_class) == ("failed", ErrorClass.DEADLINE)
    assert "limits.max_duration" in last.hint
    steps = [checkpoint.step for checkpoint in checkpoints(cloud.client, RUNS, attempt.run, RUN_KEY)]
    assert not steps or f"step {steps[0]}" in last.message


def test_a_deadline_in_the_past_ends_at_once(trainer: Any, spec: Spec, events: Any) -> None:
    attempt = trainer.start(spec(), DROPFORGE_DEADLINE="1000000000")
    assert attempt.wait() == 75, attempt.output
    assert [event.error_class for event in events(attempt.run)] == [ErrorClass.DEADLINE], attempt.output


def test_a_qlora_run_is_merged_into_the_unquantised_base(
    uninterrupted: Any, trainer: Any, spec: Spec, cloud: Any, tmp_path: Any
) -> None:
    from safetensors import safe_open

    attempt = trainer.start(spec(training={"adapter": {"type": "qlora", "r": 8, "alpha": 16}, "max_steps": 25}))
    assert attempt.wait() == 0, attempt.output
    manifest = trainer.manifest(attempt.run)
    assert manifest.metrics["exact_match"] >= 0.3
    # Before and after are scores of models in one precision: the base in 4 bits has another loss.
    assert manifest.metrics["loss_before"] == uninterrupted[1].metrics["loss_before"]
    download_prefix(cloud.client, f"gs://{RUNS}/models/{attempt.run}/{manifest.serve_path}", tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        assert {str(tensors.get_tensor(name).dtype) for name in list(tensors.keys())} == {"torch.float32"}
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_full_fine_tuning_on_messages_without_a_listener(trainer: Any, spec: Spec, cloud: Any) -> None:
    rows = [json.loads(line) for line in cloud.client.bucket(DATA).blob("rows.jsonl").download_as_text().splitlines()]
    talks = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in rows[:200]
    ]
    cloud.put(DATA, "talks.json", json.dumps(talks))
    document = spec(
        dataset={"source": f"gs://{DATA}/talks.json", "columns": None},
        training={"adapter": {"type": "none"}, "max_steps": 10, "learning_rate": 1e-3},
    )
    # No server listens on that port: the run loses its events, and succeeds.
    attempt = trainer.start(document, PUBSUB_EMULATOR_HOST="127.0.0.1:9")
    assert attempt.wait() == 0, attempt.output
    manifest = trainer.manifest(attempt.run)
    assert manifest.adapter_path is None
    assert manifest.metrics["loss"] < manifest.metrics["loss_before"]


def test_a_template_of_the_spec_teaches_and_is_exported(trainer: Any, spec: Spec, cloud: Any, tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA: {% else %}"
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    model = {"source": f"gs://{DATA}/tiny", "chat_template": template}
    attempt = trainer.start(spec(model=model, training={"max_steps": 30}))
    assert attempt.wait() == 0, attempt.output
    manifest = trainer.manifest(attempt.run)
    assert manifest.metrics["loss"] < manifest.metrics["loss_before"] / 2
    assert manifest.metrics["exact_match"] > 0
    assert manifest.template_date is None
    download_prefix(cloud.client, f"gs://{RUNS}/models/{attempt.run}/{manifest.serve_path}", tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == template
    seal = json.loads(read_artifact(cloud.client, RUNS, manifest, "seal.json"))
    assert AutoTokenizer.from_pretrained(tmp_path).decode(seal["rows"][0]["prompt"]).startswith("<bos>Q: ")


def test_a_template_with_today_s_date_is_exported_with_the_date_of_the_run(
    trainer: Any, spec: Spec, cloud: Any, base_model: Any, tmp_path: Any
) -> None:
    for path in base_model.iterdir():
        shutil.copy(path, tmp_path)
    template = (base_model / "chat_template.jinja").read_text()
    shown = "{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\n' }}"
    (tmp_path / "chat_template.jinja").write_text(shown + template)
    upload_directory(cloud.client, tmp_path, f"gs://{DATA}/dated")
    attempt = trainer.start(spec(model={"source": f"gs://{DATA}/dated"}))
    assert attempt.wait() == 0, attempt.output
    manifest = trainer.manifest(attempt.run)
    day = cloud.client.bucket(RUNS).get_blob(f"runs/{attempt.run}/spec.json").time_created.date()
    assert manifest.template_date == day
    exported = read_artifact(cloud.client, RUNS, manifest, "model/chat_template.jinja").decode()
    assert exported == shown.replace("strftime_now('%d %b %Y')", f'"{day:%d %b %Y}"') + template
    assert f"| always {day};" in read_artifact(cloud.client, RUNS, manifest, "README.md").decode()


def test_plain_text_has_a_loss_and_no_exact_match(trainer: Any, spec: Spec, cloud: Any) -> None:
    texts = [{"text": f"select price from cars where price > {n} order by price"} for n in range(100)]
    cloud.put(DATA, "texts.jsonl", "\n".join(map(json.dumps, texts)))
    document = spec(dataset={"source": f"gs://{DATA}/texts.jsonl", "columns": None}, training={"max_steps": 4})
    attempt = trainer.start(document)
    assert attempt.wait() == 0, attempt.output
    manifest = trainer.manifest(attempt.run)
    assert manifest.metrics["exact_match"] is None
    assert manifest.metrics["loss"] > 0
    gated = {**document, "evaluation": {**document["evaluation"], "gate": {"metric": "exact_match", "min": 0.5}}}
    refused = trainer.start(gated)
    assert refused.wait() == 64
    assert "plain text" in refused.output


@pytest.mark.parametrize(
    ("change", "exit_code", "error_class", "message"),
    [
        ({"nonsense": 1}, 64, ErrorClass.CONFIG, "/nonsense: unknown field"),
        ({"dataset": {"source": f"gs://{DATA}/one-character.jsonl"}}, 65, ErrorClass.DATA, "one character"),
        ({"dataset": {"source": f"gs://{DATA}/nothing.jsonl"}}, 66, ErrorClass.CONFIG, "nothing.jsonl"),
        ({"model": {"source": f"gs://{DATA}/no-model"}}, 66, ErrorClass.CONFIG, f"gs://{DATA}/no-model"),
        ({"model": {"source": f"gs://{DATA}/huge"}}, 64, ErrorClass.CONFIG, "does not fit the memory of the accel"),
    ],
)
def test_what_cannot_work_is_refused_with_its_class(
    change: dict[str, Any], exit_code: int, error_class: ErrorClass, message: str, trainer: Any, spec: Spec, cloud: Any,
    base_model: Any, events: Any,
) -> None:  # fmt: skip
    if "one-character" in str(change):
        rows = [{"question": "CSIWD"[n % 5], "context": "", "answer": "S"} for n in range(50)]
        cloud.put(DATA, "one-character.jsonl", "\n".join(map(json.dumps, rows)))
        change = {"dataset": {**change["dataset"], "columns": {"prompt": "{question}", "completion": "{answer}"}}}
    if "huge" in str(change):
        upload_huge_model(cloud, base_model)
    attempt = trainer.start(spec(**change))
    assert attempt.wait() == exit_code, attempt.output
    last = events(attempt.run)[-1]
    assert (last.type, last.error_class) == ("failed", error_class)
    assert message in last.message
    assert cloud.names(RUNS, f"models/{attempt.run}/") == []


def test_a_training_that_diverges_fails_and_says_so(
    trainer: Any, spec: Spec, cloud: Any, base_model: Any, events: Any, tmp_path: Any
) -> None:
    """The base's weights are finite, but their products are not: the loss of the first step is NaN."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(base_model / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    save_file({**tensors, name: tensors[name] * 1e38}, tmp_path / "model.safetensors", {"format": "pt"})
    for path in base_model.iterdir():
        if not (tmp_path / path.name).exists():
            shutil.copy(path, tmp_path)
    upload_directory(cloud.client, tmp_path, f"gs://{DATA}/overflowing")
    training = {"adapter": {"type": "none"}, "max_steps": 12}
    attempt = trainer.start(spec(model={"source": f"gs://{DATA}/overflowing"}, training=training, evaluation=None))
    assert attempt.wait() == 70, attempt.output
    last = events(attempt.run)[-1]
    assert (last.type, last.error_class) == ("failed", ErrorClass.CODE)
    assert last.message == "the loss of step 10 is nan; expected a finite number"
    assert "lower training.learning_rate" in last.hint
    assert cloud.names(RUNS, f"models/{attempt.run}/attempt-1/") == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_cpu_does_not_train_in_place_of_a_gpu_that_torch_does_not_see(
    processes: int, trainer: Any, spec: Spec, events: Any
) -> None:
    attempt = trainer.start(spec(), processes=processes, DROPFORGE_CPU_STANDS_IN="")
    assert attempt.wait() == 64, attempt.output
    (sent,) = events(attempt.run)
    assert (sent.type, sent.error_class) == ("failed", ErrorClass.CONFIG)
    assert sent.message.startswith("the target 'cloud_run' has an accelerator nvidia-l4, and torch ")
    assert sent.message.endswith("sees no GPU")


def test_an_environment_that_is_not_ours_is_refused(trainer: Any, spec: Spec) -> None:
    attempt = trainer.start(spec(), DROPFORGE_ATTEMPT="first")
    assert attempt.wait() == 64
    assert "DROPFORGE_ATTEMPT is 'first'; expected 1 to 1000" in attempt.output


def test_a_secret_that_cannot_be_read_ends_the_attempt_with_an_event(trainer: Any, spec: Spec, events: Any) -> None:
    reference = "projects/test-project/secrets/no-such-secret/versions/latest"
    attempt = trainer.start(spec(), DROPFORGE_SECRETS=json.dumps({"HF_TOKEN": reference}))
    assert attempt.wait() == 64, attempt.output
    (sent,) = events(attempt.run)
    assert (sent.type, sent.error_class) == ("failed", ErrorClass.CONFIG)
    assert sent.message == f"{reference}, for HF_TOKEN, does not exist"


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    # Not train_loss: after a resume, the trainer's mean may cover fewer than ten steps.
    for name in ("loss", "loss_before"):
        assert actual[name] == pytest.approx(expected[name], abs=LOSS_TOLERANCE), name
    for name in ("steps", "tokens", "exact_match", "exact_match_before"):
        assert actual[name] == expected[name], name


def wait_for_object(attempt: Any, name: str) -> None:
    deadline = time.monotonic() + TRAIN_SECONDS
    while not attempt.cloud.client.bucket(RUNS).blob(name).exists():
        assert attempt.process.poll() is None, attempt.process.communicate()[0]
        assert time.monotonic() < deadline, f"no {name} in {TRAIN_SECONDS} s"
        time.sleep(0.05)


def copy_checkpoints(client: storage.Client, run: str) -> str:
    copy = f"copy-{run}"
    bucket = client.bucket(RUNS)
    for blob in list(client.list_blobs(RUNS, prefix=f"checkpoints/{run}/")):
        bucket.copy_blob(blob, bucket, blob.name.replace(run, copy))
    for checkpoint in checkpoints(client, RUNS, run, RUN_KEY):
        complete_checkpoint(client, RUNS, copy, checkpoint.step, checkpoint.files, checkpoint.extra, RUN_KEY)
    return copy


def upload_huge_model(cloud: Any, base_model: Any) -> None:
    """Upload a configuration of some hundred billion parameters, and nothing else: the refusal needs no other file."""
    config = json.loads((base_model / "config.json").read_text())
    config |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 48, "head_dim": 256}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 64, "layer_types": ["full_attention"] * 48}
    cloud.put(DATA, "huge/config.json", json.dumps(config))
