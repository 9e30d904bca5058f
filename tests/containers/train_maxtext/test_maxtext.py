"""The MaxText container: its refusals, in any Python; and a run, killed, stopped and resumed, in MaxText's Python."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from containers.common.chat import encode, load_tokenizer
from containers.common.evaluation import Score, evaluate
from containers.train_maxtext.check import read_rows
from dropforge.base.errors import ErrorClass
from dropforge.run.artifacts import (
    Manifest,
    checkpoints,
    download_prefix,
    read_artifact,
    read_manifest,
    upload_directory,
    verify_manifest,
)
from dropforge.run.seal import read_seal
from dropforge.run.series import read_series

from ..maxtext import CANARY, PERIOD, SECRET, STEPS, Driver, Uninterrupted, job_spec, wait_for_step
from ..names import DATA, RUN_KEY, RUNS

pytestmark = pytest.mark.slow

# The same batches and arithmetic: only the compiled code differs.
LOSS_TOLERANCE = 1e-4
EXPORT_TOLERANCE = 1e-3  # MaxText rounds the tied embedding to bfloat16; transformers does not

Spec = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def spec() -> Spec:
    return job_spec


@pytest.fixture
def driver(cloud: Any) -> Iterator[Driver]:
    driver = Driver(cloud)
    yield driver
    driver.end()


@pytest.mark.parametrize(
    ("change", "exit_code", "error_class", "message"),
    [
        ({"training": {"adapter": {"type": "lora"}}}, 64, ErrorClass.CONFIG, "training.adapter.type is 'lora'"),
        ({"model": {"source": f"gs://{DATA}/tiny"}}, 64, ErrorClass.CONFIG, "'gemma3_text', which cannot be converted"),
        ({"secrets": {"HF_TOKEN": "hf-token"}}, 66, ErrorClass.CONFIG, "the secrets HF_TOKEN are not in"),
        ({"nonsense": 1}, 64, ErrorClass.CONFIG, "/nonsense: unknown field"),
        ({"dataset": {"limit": 20}}, 65, ErrorClass.DATA, "gives 19 sequences of 64 tokens; one step takes 32"),
        (
            {"dataset": {"columns": {"prompt": "{query}", "completion": "{answer}"}}},
            65,
            ErrorClass.DATA,
            "dataset.columns.prompt names the column 'query'",
        ),
    ],
    ids=["adapter", "family", "token", "malformed", "too-little-data", "wrong-column"],
)
def test_what_cannot_work_is_refused_with_its_class(
    change: dict[str, Any], exit_code: int, error_class: ErrorClass, message: str, driver: Driver, spec: Spec,
    base_qwen3: Path, events: Any,
) -> None:  # fmt: skip
    attempt = driver.start(spec(**{"training": {"gradient_accumulation_steps": 4}, **change}))
    assert attempt.wait() == exit_code, attempt.output
    last = events(attempt.run)[-1]
    assert (last.type, last.error_class) == ("failed", error_class)
    assert message in last.message
    assert driver.cloud.names(RUNS, f"models/{attempt.run}/") == []


def test_a_deadline_in_the_past_ends_at_once(driver: Driver, spec: Spec, base_qwen3: Path, events: Any) -> None:
    attempt = driver.start(spec(), DROPFORGE_DEADLINE="1000000000")
    assert attempt.wait() == 75, attempt.output
    assert [event.error_class for event in events(attempt.run)] == [ErrorClass.DEADLINE]


@dataclass
class Chain:
    """Three attempts of one run, and the result of the same training without interruption."""

    run: str
    outputs: list[str]
    codes: list[int]
    preempted_step: int
    saved_after_kill: int
    disk: Path  # of the attempts that resumed
    expected: dict[str, Any]
    manifest: Manifest


@pytest.fixture(scope="session")
def chain(
    image_driver: Driver,
    cloud: Any,
    uninterrupted_maxtext: Uninterrupted,
    tmp_path_factory: pytest.TempPathFactory,
) -> Chain:
    """The first attempt was killed after it had saved little; resume and stop on a second disk; finish."""
    first, disk = uninterrupted_maxtext, tmp_path_factory.mktemp("disk")
    run = first.run
    # Enough time to save a checkpoint on a machine that is busy with other tests.
    more = {"DROPFORGE_WORK_DIRECTORY": str(disk), "DROPFORGE_GRACE_SECONDS": "100", **SECRET}
    second = image_driver.start(first.document, run, 2, **more)
    wait_for_step(disk / run / "progress.jsonl", first.saved + 1, second)
    second.process.send_signal(signal.SIGTERM)
    second.wait()
    preempted_step = checkpoints(cloud.client, RUNS, run, RUN_KEY)[0].step
    third = image_driver.start(first.document, run, 3, **more)
    third.wait()
    manifest = read_manifest(cloud.client, RUNS, run, RUN_KEY)
    assert manifest is not None, third.output
    attempts = (first.attempt, second, third)
    return Chain(
        run,
        [attempt.output for attempt in attempts],
        [attempt.process.returncode for attempt in attempts],
        preempted_step,
        first.saved,
        disk / run,
        first.result,
        manifest,
    )


@pytest.mark.timeout(1800)
def test_killed_and_stopped_and_resumed_it_ends_with_the_same_loss(chain: Chain, events: Any) -> None:
    assert chain.codes == [-signal.SIGKILL, 75, 0], chain.outputs
    assert chain.saved_after_kill in (PERIOD, 2 * PERIOD)
    assert "read the token ids of an earlier attempt" in (chain.disk / "logs" / "prepare.log").read_text()
    assert chain.saved_after_kill < chain.preempted_step < STEPS
    metrics = chain.manifest.metrics
    for name in ("loss", "loss_before", "train_loss"):
        probe = {"loss": "probe_loss", "loss_before": "probe_loss_before"}.get(name, name)
        assert metrics[probe] == pytest.approx(chain.expected[name], abs=LOSS_TOLERANCE), name
    assert (metrics["steps"], metrics["tokens"]) == (STEPS, chain.expected["tokens"])
    assert metrics["rows_per_step"] == 16
    assert metrics["tokens_per_step"] == pytest.approx(chain.expected["tokens"] / STEPS, abs=0.1)
    assert all('"rows_per_step": 16' in output for output in chain.outputs)
    sent = events(chain.run)
    assert [event.resumed_step for event in sent if event.type == "started"] == [
        0,
        chain.saved_after_kill,
        chain.preempted_step,
    ]
    (stopped,) = [event for event in sent if event.type == "preempted"]
    assert (stopped.attempt, stopped.step) == (2, chain.preempted_step)


@pytest.mark.timeout(1800)
def test_it_learnt_and_the_exported_model_is_the_trained_one(
    chain: Chain, cloud: Any, base_qwen3: Path, tmp_path: Path
) -> None:
    """MaxText's scores of the held-out rows, by one forward pass, are those of greedy decoding with transformers."""
    manifest = chain.manifest
    metrics: dict[str, Any] = manifest.metrics
    assert verify_manifest(cloud.client, RUNS, manifest) == []
    assert metrics["exact_match_before"] == 0
    assert metrics["exact_match"] >= 0.5
    assert metrics["loss"] < metrics["loss_before"] / 3
    assert metrics["probe_loss_exported"] == pytest.approx(metrics["probe_loss"], abs=EXPORT_TOLERANCE)
    download_prefix(cloud.client, f"gs://{RUNS}/models/{chain.run}/{manifest.serve_path}", tmp_path)
    samples = json.loads(read_artifact(cloud.client, RUNS, manifest, "samples.json"))
    for directory, suffix, answer in ((base_qwen3, "_before", "before"), (tmp_path, "", "after")):
        score = by_transformers(directory, chain.disk / "held_out.json")
        assert metrics[f"exact_match{suffix}"] == score.exact_match
        assert metrics[f"loss{suffix}"] == pytest.approx(score.loss, abs=EXPORT_TOLERANCE)
        assert [sample[answer] for sample in samples] == score.answers[: len(samples)]
    assert metrics["rows_eval"] == len(score.answers) == 16


@pytest.mark.timeout(1800)
def test_the_exported_model_is_sealed(chain: Chain, cloud: Any) -> None:
    seal = read_seal(cloud.client, RUNS, chain.manifest)
    assert seal is not None
    assert [row.row for row in seal.rows] == list(range(1, 17))
    assert seal.noise.divergence > 0
    assert seal.links == {name: chain.manifest.metrics[name] for name in ("trained_to_exported", "saved_to_reloaded")}
    tokenizer = load_tokenizer(str(chain.disk / "export" / "model"), trust_remote_code=False)
    answers = [tokenizer.decode(row.answer, skip_special_tokens=True).strip() for row in seal.rows]
    samples = json.loads(read_artifact(cloud.client, RUNS, chain.manifest, "samples.json"))
    assert all(sample["after"].startswith(answer) for sample, answer in zip(samples, answers, strict=False))


def by_transformers(directory: Path, held_out: Path) -> Score:
    """A model's scores on held-out rows, as containers/train_trl judges a model."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer, rows = load_tokenizer(str(directory), trust_remote_code=False), read_rows(held_out)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return evaluate(model, tokenizer, rows, encode(tokenizer, rows, 128, "the held-out rows"), 40)


@pytest.mark.timeout(1800)
def test_configuration_is_the_base_model_s_and_generation_stops_at_the_end_of_a_turn(
    chain: Chain, cloud: Any, base_qwen3: Path
) -> None:
    config = json.loads(read_artifact(cloud.client, RUNS, chain.manifest, "model/config.json"))
    assert config == json.loads((base_qwen3 / "config.json").read_text())
    generation = json.loads(read_artifact(cloud.client, RUNS, chain.manifest, "model/generation_config.json"))
    tokenizer = json.loads((base_qwen3 / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert generation["eos_token_id"][0] == ids["<end_of_turn>"]
    assert generation["pad_token_id"] == ids["<pad>"]


@pytest.mark.timeout(1800)
def test_a_stage_that_has_done_its_work_is_not_run_again(chain: Chain) -> None:
    second, third = (stages_of(output) for output in chain.outputs[1:])
    assert "import" not in second  # a checkpoint has all weights
    assert second["prepare"] == "done"
    assert third == {
        "prepare": "done already",
        "train": "succeeded",
        "verify": "done",
        "export": "done",
        "check": "done",
        "publish": "done",
    }


@pytest.mark.timeout(1800)
def test_events_and_series_tell_the_steps_the_checkpoints_and_no_secret(
    chain: Chain, events: Any, series: Any, cloud: Any
) -> None:
    sent = events(chain.run)
    progress = series(chain.run, attempt=3)
    assert progress.step[-1] == progress.total_steps == STEPS
    assert progress.loss[-1] < 0.2
    assert progress.tokens_per_second[-1] > 0
    curve = [loss for loss in progress.held_out_loss if loss is not None]
    assert curve[-1] == progress.held_out_loss[-1] == pytest.approx(chain.manifest.metrics["probe_loss"], rel=1e-5)
    assert curve[0] >= curve[-1]
    saved = [event.step for event in sent if event.type == "checkpoint"]
    assert saved[-1] == STEPS
    # Orbax also saves the first step, which is not reported. The killed attempt may not have reported its last step.
    assert {chain.preempted_step} < set(saved) <= {PERIOD, 2 * PERIOD, chain.preempted_step, STEPS}
    assert {PERIOD, 2 * PERIOD} & set(saved)
    assert sent[-1].type in ("succeeded", "checkpoint")
    everything = "".join(chain.outputs) + "".join(event.model_dump_json() for event in sent)
    for blob in cloud.client.list_blobs(RUNS, prefix=f"models/{chain.run}/"):
        everything += blob.download_as_bytes().decode("latin-1")
    # The stopped attempt may have trained for less than a second, and then it has no series.
    kept = [read_series(cloud.client, RUNS, chain.run, attempt, RUN_KEY) for attempt in (1, 2, 3)]
    everything += "".join(each.series.model_dump_json() for each in kept if each is not None)
    assert CANARY not in everything


@pytest.mark.timeout(1800)
def test_a_committed_run_is_told_again_and_not_trained_again(chain: Chain, image_driver: Driver, events: Any) -> None:
    again = image_driver.start({"not": "even a spec"}, chain.run, attempt=4)
    assert again.wait() == 0, again.output
    assert [event.type for event in events(chain.run) if event.attempt == 4] == ["succeeded"]


@pytest.mark.timeout(1800)
def test_pretraining_on_synthetic_data_exports_the_model_that_it_trained(
    slow_driver: Driver, cloud: Any, spec: Spec, base_qwen3: Path, tmp_path: Path
) -> None:
    training = {"method": "pretrain", "max_steps": 12, "checkpoint_steps": 12, "max_length": 32}
    document = spec(training=training, evaluation=None)
    document |= {"dataset": {"type": "synthetic", "rows": 32}, "target": {**document["target"], "type": "ray"}}
    attempt = slow_driver.start(document, DROPFORGE_WORK_DIRECTORY=str(tmp_path))
    assert attempt.wait() == 0, attempt.output
    assert not (tmp_path / attempt.run / "stages" / "import.json").exists()  # it starts from random weights
    manifest = read_manifest(cloud.client, RUNS, attempt.run, RUN_KEY)
    assert manifest is not None
    assert manifest.dataset.uri == "synthetic"
    metrics: dict[str, Any] = manifest.metrics
    assert metrics["tokens"] == 12 * 16 * 32  # steps, rows of a step, tokens of a row
    assert metrics["probe_loss"] < metrics["probe_loss_before"] / 2
    assert metrics["probe_loss_exported"] == pytest.approx(metrics["probe_loss"], abs=5e-3)


@pytest.mark.timeout(1800)
def test_a_template_of_the_spec_with_today_s_date_is_exported_with_the_day_of_the_run(
    image_driver: Driver, cloud: Any, spec: Spec, base_qwen3: Path, tmp_path: Path
) -> None:
    """The limit of the judged answers is lower than most of them: they are counted."""
    template = (
        "{{ strftime_now('%Y-%m-%d') }}\n{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA: "
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    document = spec(model={"chat_template": template}, training={"max_steps": 2}, evaluation={"max_new_tokens": 2})
    attempt = image_driver.start(document, DROPFORGE_WORK_DIRECTORY=str(tmp_path))
    assert attempt.wait() == 0, attempt.output
    manifest = read_manifest(cloud.client, RUNS, attempt.run, RUN_KEY)
    assert manifest is not None
    day = cloud.client.bucket(RUNS).get_blob(f"runs/{attempt.run}/spec.json").time_created.date()
    assert manifest.template_date == day
    exported = read_artifact(cloud.client, RUNS, manifest, "model/chat_template.jinja").decode()
    assert exported == template.replace("strftime_now('%Y-%m-%d')", f'"{day}"')
    assert f"| always {day};" in read_artifact(cloud.client, RUNS, manifest, "README.md").decode()
    seal = read_seal(cloud.client, RUNS, manifest)
    tokenizer = load_tokenizer(str(tmp_path / attempt.run / "export" / "model"), trust_remote_code=False)
    assert seal is not None
    assert tokenizer.decode(seal.rows[0].prompt).startswith(f"{day}\nQ: ")
    metrics: dict[str, Any] = manifest.metrics
    assert metrics["max_new_tokens"] == 2
    assert 0 < metrics["answers_beyond"] <= metrics["rows_eval"] == 16


@pytest.mark.skipif(
    not os.environ.get("DROPFORGE_TEST_FAMILIES"), reason="another minute; set DROPFORGE_TEST_FAMILIES=1 to run it"
)
@pytest.mark.timeout(1800)
def test_a_llama_with_scaled_rotary_embeddings_is_converted_both_ways(
    image_driver: Driver, cloud: Any, spec: Spec, base_qwen3: Path, tmp_path: Path
) -> None:
    source, disk = upload_llama(cloud, base_qwen3, tmp_path), tmp_path / "disk"
    document = spec(
        model={"source": source}, training={"max_steps": 2, "packing": True}, evaluation={"max_new_tokens": 2}
    )
    attempt = image_driver.start(document, DROPFORGE_WORK_DIRECTORY=str(disk))
    assert attempt.wait() == 0, attempt.output
    manifest = read_manifest(cloud.client, RUNS, attempt.run, RUN_KEY)
    assert manifest is not None
    metrics = manifest.metrics
    work = disk / attempt.run
    base = by_transformers(work / "base", work / "held_out.json")
    assert metrics["loss_before"] == pytest.approx(base.loss, abs=EXPORT_TOLERANCE)
    # Saved in 16 bits, like the base.
    assert metrics["probe_loss_exported"] == pytest.approx(metrics["probe_loss"], abs=5e-2)


def stages_of(output: str) -> dict[str, str]:
    """The last message of each stage in a log."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["stage"]: line["message"] for line in lines}


def upload_llama(cloud: Any, base: Path, directory: Path) -> str:
    """An untrained Llama with Llama 3.1's rotary embeddings, an output layer of its own, and 16-bit weights."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,  # large enough that attention, and so the rotary embedding, changes the loss
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    upload_directory(cloud.client, directory, f"gs://{DATA}/tiny-llama")
    return f"gs://{DATA}/tiny-llama"
