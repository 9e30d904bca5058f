"""The parts of the MaxText container that need no MaxText: families, batches, stages, methods, checks."""

from __future__ import annotations

import gc
import importlib
import json
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest

from containers.common.chat import IGNORED, Encoded, encode, load_tokenizer
from containers.common.errors import BAD_CONFIG, BAD_DATA, INTERNAL, OUT_OF_MEMORY, JobError
from containers.common.evaluation import AnswerLimit, answer_limit, answer_sizes, answer_tokens
from containers.common.job import Job
from containers.common.redactor import Redactor
from containers.common.report import Reporter
from containers.common.rows import Split
from containers.common.stop import Stopped
from containers.common.token_rows import TokenRows
from containers.train_maxtext import check, imports, stages
from containers.train_maxtext import watch as watch_module
from containers.train_maxtext.batches import Data, collate, pack
from containers.train_maxtext.driver import train
from containers.train_maxtext.export_hf import check_tensors, tensors
from containers.train_maxtext.family import FAMILIES, family_of
from containers.train_maxtext.methods import load_method
from containers.train_maxtext.methods.pretrain import PROBE_TOKENS, synthetic
from containers.train_maxtext.methods.sft import judged, probe_rows, sequence_shape
from containers.train_maxtext.prepare import step_size, total_steps
from containers.train_maxtext.stages import AFTER_TRAIN, MODULES, Runner, killed
from containers.train_maxtext.train import schedule
from containers.train_maxtext.verify import check_trained
from containers.train_maxtext.watch import Watch
from containers.train_maxtext.work import Work
from dropforge.base.errors import ErrorClass
from dropforge.cloud.clients import Clients
from dropforge.fit.maxtext import FAMILIES as KNOWN_FAMILIES
from dropforge.fit.maxtext import padded_length
from dropforge.rows import Row
from dropforge.spec import JobSpec
from dropforge.spec.methods import method_of, trained_by
from dropforge.spec.sections import Evaluation

from .. import same_class
from ..conftest import ROOT
from ..interrupted import StopAt, stopped_everywhere
from ..maxtext import append_lines, start_line, step_line

QWEN3_4B = {  # https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA31 = {
    **QWEN3_4B,
    "model_type": "llama",
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA31_ROPE,
    "tie_word_embeddings": False,
}


def test_a_qwen3_is_a_template_with_its_own_sizes() -> None:
    family = family_of(QWEN3_4B, "Qwen/Qwen3-4B")
    # MaxText's own qwen3-4b.yml has the same sizes.
    assert family.settings == {
        "base_emb_dim": 2560,
        "base_mlp_dim": 9728,
        "base_num_decoder_layers": 36,
        "base_num_query_heads": 32,
        "base_num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "normalization_layer_epsilon": 1e-06,
        "rope_max_timescale": 1000000,
        "logits_via_embedding": True,
        "normalize_embedding_logits": False,
    }
    assert family.arguments()[:2] == ["model_name=qwen3-0.6b", "override_model_config=true"]
    assert "logits_via_embedding=true" in family.arguments()


def test_a_llama_has_llama_3_1_s_rotary_embeddings_or_plain_ones() -> None:
    assert family_of(LLAMA31, "l").settings["rope_use_scale"] is True
    plain = {**LLAMA31, "rope_scaling": None}
    assert family_of(plain, "l").settings["rope_use_scale"] is False
    new = {name: value for name, value in LLAMA31.items() if not name.startswith("rope_")}
    parameters = {**LLAMA31_ROPE, "rope_theta": 500000.0}
    assert family_of({**new, "rope_parameters": parameters}, "l") == family_of(LLAMA31, "l")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2', which cannot be converted to MaxText and back; expected one of llama, qwen3"),
        ({**QWEN3_4B, "attention_bias": True}, "attention_bias True; MaxText's model of this family expects False"),
        ({**QWEN3_4B, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling {'factor': 4.0}"),
        ({**LLAMA31, "rope_scaling": {**LLAMA31_ROPE, "factor": 32.0}}, "or Llama 3.1's"),
        ({"model_type": "qwen3", "rope_theta": 1e4}, "has no 'num_attention_heads'"),
    ],
)
def test_a_model_that_would_be_converted_wrongly_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        family_of(config, "some/model")
    assert message in caught.value.message
    assert caught.value.exit_code == BAD_CONFIG


def rows(*lengths: int) -> Encoded:
    """Rows of 1, 2, 3, …; the first two tokens of each are the prompt."""
    ids = [list(range(1, length + 1)) for length in lengths]
    return Encoded.of(ids, [[IGNORED] * 2 + row[2:] for row in ids])


def test_rows_in_one_sequence_are_kept_apart_and_only_answers_are_learnt() -> None:
    batch = collate(rows(4, 3), [[0, 1]], length=8)
    assert batch["inputs"].tolist() == [[1, 2, 3, 4, 1, 2, 3, 0]]
    assert batch["inputs_position"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert batch["inputs_segmentation"].tolist() == [[1, 1, 1, 1, 2, 2, 2, 0]]
    assert batch["targets"].tolist() == [[2, 3, 4, 0, 2, 3, 0, 0]]
    # Token 2 of each row predicts token 3. The last token predicts nothing: not the first token of the next row.
    assert batch["targets_segmentation"].tolist() == [[0, 1, 1, 0, 0, 2, 0, 0]]


def test_packing_keeps_every_row_once_and_wastes_little() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 500).tolist()
    sequences = pack(lengths, 64)
    assert sorted(row for sequence in sequences for row in sequence) == list(range(500))
    assert all(sum(lengths[row] for row in sequence) <= 64 for sequence in sequences)
    assert len(sequences) < 1.1 * sum(lengths) / 64


def test_a_step_has_the_same_rows_whenever_it_is_asked_for(tmp_path: Path) -> None:
    data = Data(rows(*range(3, 13)), rows(3), [[index] for index in range(10)], 16)
    data.save(tmp_path / "rows.npz")
    loaded = Data.load(tmp_path / "rows.npz")
    steps = [data.batch(step, 4, seed=1)["inputs"].tolist() for step in range(5)]
    assert loaded.batch(3, 4, seed=1)["inputs"].tolist() == steps[3]
    # Two epochs of ten sequences are five steps of four: each sequence occurs twice, once among the first ten.
    lengths = [sum(token != 0 for token in line) for step in steps for line in step]
    assert sorted(lengths[:10]) == sorted(lengths[10:]) == list(range(3, 13))
    assert lengths[:10] != lengths[10:]
    assert data.batch(0, 4, seed=2)["inputs"].tolist() != steps[0]


def test_probes_are_all_rows_once_whatever_the_batch() -> None:
    batches = Data(rows(3), rows(4, 5, 6), [[0]], 8).probes(2)
    assert [batch["inputs"].shape for batch in batches] == [(2, 8), (2, 8)]
    assert sum(int((batch["targets_segmentation"] != 0).sum()) for batch in batches) == 2 + 3 + 4


def test_the_targets_of_an_answer_are_marked_whatever_the_batch(tmp_path: Path) -> None:
    """Row i has the tokens 1 to its length; the last two are its answer, but for the second row."""
    data = Data(rows(3), rows(3), [[0]], 8, rows(4, 5, 6), np.array([2, 0, 2], np.int32))
    data.save(tmp_path / "rows.npz")
    batches = list(Data.load(tmp_path / "rows.npz").judged(2))
    assert [batch["answers"].shape for batch in batches] == [(2, 8), (2, 8)]
    marked = [batch["targets"][line][batch["answers"][line] == 1].tolist() for batch in batches for line in (0, 1)]
    assert marked == [[3, 4], [], [5, 6], []]
    assert list(Data(rows(3), rows(3), [[0]], 8).judged(2)) == []


def test_held_out_rows_that_do_not_fit_are_not_matched() -> None:
    tokenizer = load_tokenizer(str(same_class.make(ROOT / "build" / "same_class", "qwen3")), False)
    questions = [*(f"is {number} a number?" for number in range(9)), "is it " + "very " * 400]
    answer = {"role": "assistant", "content": "yes"}
    held_out = [Row(({"role": "user", "content": question}, answer)) for question in questions]
    encoded = encode(tokenizer, held_out, 100, "rows")
    assert encoded.dropped == 1
    fields = judged(Split([], held_out, 0), encoded, tokenizer, AnswerLimit(100, 0))  # type: ignore[arg-type]
    data = Data(rows(3), rows(3), [[0]], 100, **fields)
    assert sum(bool(batch["answers"].any()) for batch in data.judged(1)) == 9
    assert data.exact_match(9) == 0.9
    assert Data(rows(3), rows(3), [[0]], 8, rows(3)).exact_match(0) is None


def test_an_answer_beyond_the_limit_is_counted_and_not_matched() -> None:
    tokenizer = load_tokenizer(str(same_class.make(ROOT / "build" / "same_class", "qwen3")), False)
    answers = ["yes", "yes, it is a number, and a number it is, as far as anybody knows"]
    held_out = [
        Row(({"role": "user", "content": f"is {at} a number?"}, {"role": "assistant", "content": answers[at % 2]}))
        for at in range(6)
    ]
    encoded = encode(tokenizer, held_out, 100, "rows")
    shorter = answer_sizes(tokenizer, encoded)[0] - 1  # without the token that ends the answer
    limited = spec().model_copy(update={"evaluation": Evaluation(max_new_tokens=shorter)})
    limit = answer_limit(limited, tokenizer, held_out, encoded, most=100)
    assert limit == (shorter, 3)
    data = Data(rows(3), rows(3), [[0]], 100, **judged(Split([], held_out, 0), encoded, tokenizer, limit))  # type: ignore[arg-type]
    assert sum(bool(batch["answers"].any()) for batch in data.judged(1)) == 3
    unlimited = spec().model_copy(update={"evaluation": Evaluation()})
    longest = answer_limit(unlimited, tokenizer, held_out, encoded, most=100)
    assert longest.beyond == 0
    whole = judged(Split([], held_out, 0), encoded, tokenizer, longest)  # type: ignore[arg-type]
    assert list(whole["answers"]) == answer_sizes(tokenizer, encoded)


def test_rows_beyond_two_thousand_million_tokens_keep_their_place() -> None:
    tokens = np.broadcast_to(np.int32(7), 2**31 + 8)  # takes no memory
    huge = TokenRows(tokens, np.array([0, 2**31, 2**31 + 3, 2**31 + 8]))
    assert collate(Encoded(huge, huge), [[1], [2]], 8)["inputs"].sum(-1).tolist() == [21, 35]
    for made in (rows(4), synthetic(pretraining(), vocabulary=11, tpu=False).data.train):
        assert made.input_ids.starts.dtype == np.int64


STOP = 9


@pytest.mark.parametrize(
    ("labels", "ids", "expected"),
    [
        ([IGNORED, IGNORED, 5, STOP], [3, 4, 5, STOP], 2),
        ([IGNORED, 5, STOP, IGNORED, 6, 7, STOP], [3, 5, STOP, 4, 6, 7, STOP], 3),  # the last answer of two
        ([IGNORED, IGNORED, 5, 6], [3, 4, 5, 6], 0),  # cut before its end
        ([5, STOP], [5, STOP], 2),
    ],
)
def test_an_answer_is_the_labelled_end_of_a_row(labels: list[int], ids: list[int], expected: int) -> None:
    assert answer_tokens(np.array(ids, np.int32), np.array(labels, np.int32), STOP) == expected


def spec(**training: Any) -> JobSpec:
    document = {
        "api_version": "dropforge/v1",
        "name": "tiny",
        "model": {"source": "gs://bucket/model"},
        "dataset": {"source": "gs://bucket/rows.jsonl"},
        "training": {"adapter": {"type": "none"}, **training},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
    }
    return JobSpec.model_validate_json(json.dumps(document))


def pretraining(max_length: int = 64) -> JobSpec:
    document = spec(max_length=max_length).model_dump(mode="json", by_alias=True)
    document["training"]["method"] = "pretrain"
    target = {"type": "ray", "placements": [{"region": "us-east5"}]}
    document |= {"dataset": {"type": "synthetic", "rows": 30}, "target": target}
    return JobSpec.model_validate_json(json.dumps(document))


def test_a_batch_size_counts_rows_unless_the_spec_asks_for_packing() -> None:
    lengths = [100] * 50
    assert sequence_shape(spec(per_device_train_batch_size=4, max_length=1024), lengths, [], True) == (False, 128)
    assert sequence_shape(spec(max_length=1024), lengths, [], True) == (True, 1024)
    packed = spec(per_device_train_batch_size=4, max_length=1024, packing=True)
    assert sequence_shape(packed, lengths, [], True) == (True, 1024)
    # 5 sequences of 10 rows on each of 8 devices, 4 at once, twice.
    prepared = {"batch_size": 4, "sequences": 5, "rows_train": 50, "tokens_train": 5000}
    size = step_size(spec(gradient_accumulation_steps=2), prepared, devices=8)
    assert size == {"rows_per_step": 640, "tokens_per_step": 64_000}


def test_steps_are_of_all_devices_and_whole_epochs() -> None:
    prepared = {"sequences": 1000, "batch_size": 1, "length": 1024}
    assert total_steps(spec(epochs=2), prepared, devices=8) == 250
    assert total_steps(spec(max_steps=7), prepared, devices=8) == 7
    assert total_steps(spec(gradient_accumulation_steps=4), prepared, devices=8) == 32
    with pytest.raises(JobError, match="gives 1000 sequences of 1024 tokens; one step takes 1600"):
        total_steps(spec(gradient_accumulation_steps=200), prepared, devices=8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", ["lr_schedule_type=cosine", "warmup_steps_fraction=0.03", "learning_rate_final_fraction=0"]),
        ("linear", "wsd_decay_steps_fraction=0.97"),
        ("constant", "warmup_steps_fraction=0.0"),
        ("constant_with_warmup", "warmup_steps_fraction=0.03"),
    ],
)
def test_the_learning_rate_s_course_is_told_in_maxtext_s_words(name: str, expected: list[str] | str) -> None:
    words = schedule(spec(lr_scheduler_type=name), 100)
    assert words == expected or expected in words


@pytest.mark.parametrize("steps", [7, 100, 1013])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_warm_up_of_a_spec_is_maxtext_s_number_of_steps(warmup: int, steps: int) -> None:
    """MaxText computes int(steps * share)."""
    words = dict(word.split("=") for word in schedule(spec(warmup_steps=warmup, warmup_ratio=0.5), steps))
    assert int(steps * float(words["warmup_steps_fraction"])) == warmup


@pytest.mark.parametrize(
    ("change", "exit_code", "message"),
    [
        ({"step": 16}, BAD_DATA, "training ended at step 16 of 200: the data ran out"),
        ({"loss": float("nan")}, INTERNAL, "the loss after step 200 is nan"),
        ({"loss": None}, INTERNAL, "the loss after step 200 is None"),
        ({"train_loss": float("inf")}, INTERNAL, "the train_loss after step 200 is inf"),
    ],
)
def test_training_that_ended_well_and_did_not_do_its_work_has_failed(
    change: dict[str, Any], exit_code: int, message: str
) -> None:
    trained = {"step": 200, "total_steps": 200, "loss": 0.5, "train_loss": 0.6}
    check_trained(trained)
    check_trained({**trained, "train_loss": None})  # no step was left to train
    with pytest.raises(JobError, match=message) as caught:
        check_trained({**trained, **change})
    assert caught.value.exit_code == exit_code


def test_exported_tensors_are_the_base_s_by_name_shape_and_type(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    base = tensors(tmp_path)
    assert base == {"a": ("F32", [2, 3])}
    with_output = {**base, "lm_head.weight": ("F32", [9, 3])}
    check_tensors(base, with_output, "float32", tied=True)
    with pytest.raises(JobError, match=r"lm_head\.weight: None, expected \('F32', \[9, 3\]\)"):
        check_tensors(with_output, base, "float32", tied=False)
    for exported in ({}, {"a": ("F32", [3, 2])}, {"a": ("BF16", [2, 3])}, {**base, "b": ("F32", [1])}):
        with pytest.raises(JobError, match=r"1 of [12] exported tensors differ from the base model"):
            check_tensors(base, exported, "float32", tied=True)


@pytest.mark.parametrize("family", ["qwen3", "llama31"])
def test_the_loaded_export_is_compared_with_its_files_in_every_bit(family: same_class.Family, tmp_path: Path) -> None:
    directory = same_class.make(ROOT / "build" / "same_class", family)
    model, missing = check.load(directory, trust_remote_code=False)
    check.check_weights(model, missing)
    check.check_files(directory, model)
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] += 1
    with pytest.raises(JobError, match=r"has another model\.layers\.1\.self_attn\.v_proj\.weight than model"):
        check.check_files(directory, model)


def test_a_stage_that_was_killed_says_whether_another_attempt_may_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert killed("export", -9).exit_code == OUT_OF_MEMORY
    assert killed("train", -6).error_class is ErrorClass.INFRASTRUCTURE
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    work = Work(tmp_path)
    work.begin(spec().model_dump(mode="json", by_alias=True), ["HF_TOKEN"])
    job = Job("p", "run", 1, "b", "", None, 10)
    (tmp_path / "abort.py").write_text("import os; print('a last line', flush=True); os.abort()")
    runner = Runner(work, job, str, {"verify": "abort"})
    with pytest.raises(JobError, match=r"'verify' ended by signal 6 and left no result") as caught:
        runner.run("verify")
    assert caught.value.error_class is ErrorClass.INFRASTRUCTURE
    assert "a last line" in runner.log_tail("verify")


@pytest.mark.parametrize(("tpu", "expected"), [(True, "tpu,cpu"), (False, "")])
def test_the_image_for_tpus_trains_on_no_cpu(
    tpu: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "on_tpu", lambda: tpu)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (tmp_path / "told.py").write_text("import os; print('platforms', os.environ.get('JAX_PLATFORMS', '')); os.abort()")
    work = Work(tmp_path)
    work.begin(spec().model_dump(mode="json", by_alias=True), [])
    runner = Runner(work, Job("p", "run", 1, "b", "", None, 10), str, {"train": "told", "export": "told"})
    for stage, platforms in (("train", expected), ("export", "cpu")):
        with pytest.raises(JobError):
            runner.run(stage)
        assert f"platforms {platforms}\n" in runner.log_tail(stage)


def test_results_are_of_one_spec(tmp_path: Path) -> None:
    work = Work(tmp_path)
    first, second = (spec(seed=seed).model_dump(mode="json", by_alias=True) for seed in (1, 2))
    work.begin(first, [])
    work.write_result("prepare", {"tpu": False})
    work.begin(first, [])
    assert work.done("prepare") == {"tpu": False}
    work.begin(second, [])
    assert work.result("prepare") is None


@pytest.mark.parametrize(("max_length", "tpu", "length"), [(20, False, 32), (1024, True, 1024), (32_768, True, 32_768)])
def test_synthetic_rows_are_whole_sequences_of_random_tokens(max_length: int, tpu: bool, length: int) -> None:
    made = [synthetic(pretraining(max_length), 500, tpu) for _ in range(2)]
    data = made[0].data
    ids = data.train.input_ids
    assert data.length == length
    assert data.train.lengths == [length] * 30
    assert ids == made[1].data.train.input_ids
    assert ids == data.train.labels  # each token is learnt
    assert {int(ids.values.min()), int(ids.values.max())} <= {0, 1, 2, 3, 4, 5, *range(480, 500)}
    assert len(data.probe.lengths) == max(1, min(30, PROBE_TOKENS // length))
    assert data.probe.input_ids[0] == ids[0]
    assert data.batch(0, 2, seed=0)["targets_segmentation"].sum() == 2 * (length - 1)


def test_every_stage_has_a_module() -> None:
    assert [module for module in MODULES.values() if find_spec(module) is None] == []
    assert set(AFTER_TRAIN) < set(MODULES)


def test_methods_are_known_by_the_names_of_the_spec() -> None:
    known = {name: method_of(name).starts_from_base for name in trained_by("maxtext") if load_method(name)}
    assert known == {"pretrain": False, "sft": True}
    with pytest.raises(JobError, match=r"training\.method is 'dpo'; expected one of sft, pretrain"):
        load_method("dpo")


def test_a_package_that_is_not_used_costs_nothing_until_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rarely_used.py").write_text("open('executed', 'w').close()\nVALUE = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "UNUSED", frozenset({"rarely_used"}))
    frozen, was_enabled = gc.get_freeze_count(), gc.isenabled()
    with imports.quick_imports():
        assert not gc.isenabled()
        package = importlib.import_module("rarely_used")
    assert gc.isenabled() is was_enabled
    assert gc.get_freeze_count() > frozen
    assert not (tmp_path / "executed").exists()
    assert package.VALUE == 3
    assert (tmp_path / "executed").exists()
    assert not any(isinstance(finder, imports.LazyFinder) for finder in sys.meta_path)


TRAINER = """
import json, signal, sys, time
from pathlib import Path
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
work = Path(sys.argv[1])
def save(step):
    (work / "training/run/checkpoints" / str(step)).mkdir(parents=True)
with (work / "progress.jsonl").open("a", buffering=1) as file:
    size = {"rows_per_step": 8, "tokens_per_step": 800.0}
    before = {"loss_before": 9.0, "judged_before": {"exact_match": 0.0}}
    print(json.dumps({"step": 0, "total_steps": 10, **before, **size}), file=file)
    for step in range(1, 11):
        print(json.dumps({"step": step, "loss": 9.0 - step, "tokens": 100 * step, "seconds": float(step)}), file=file)
        if step in (1, 4, 8):
            save(step)
        while step == 9 and WAITS and not signals:
            time.sleep(0.01)
        if signals:
            break
    save(step)
    result = {"step": step, "stopped": bool(signals)}
    (work / "stages/train.json").write_text(json.dumps(result))
"""


JOB = Job("p", "run", 1, "b", "", None, 10)


class Store:
    """Replaces the checkpoint store: an upload is done when the next one begins. Keeps the notes of each step."""

    def __init__(self) -> None:
        self.saved_step = self.uploading = 0
        self.notes: dict[int, dict[str, Any]] = {}

    def save(self, step: int, local: Path, notes: dict[str, Any]) -> None:
        assert local.is_dir()
        self.saved_step, self.uploading, self.notes[step] = self.uploading, step, notes


def watched_training(directory: Path, monkeypatch: pytest.MonkeyPatch, *, waits: bool) -> tuple[Runner, Watch, Store]:
    """A trainer that takes ten steps. Like Orbax, it also saves the first step."""
    (directory / "trainer.py").write_text(TRAINER.replace("WAITS", str(waits)))
    monkeypatch.setenv("PYTHONPATH", str(directory))
    work = Work(directory)
    work.begin(spec(checkpoint_steps=4).model_dump(mode="json", by_alias=True), [])
    store: Any = Store()
    notes = {"tokens": 5000, "train_seconds": 50.0}
    return (
        Runner(work, JOB, str, {"train": "trainer"}),
        Watch(work, store, Reporter(JOB, Redactor(), Clients()), 4, notes),
        store,
    )


def test_checkpoints_that_were_asked_for_go_to_the_bucket_with_what_was_so_at_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, watch, store = watched_training(tmp_path, monkeypatch, waits=False)
    train(runner, watch, lambda: 10)
    assert list(store.notes) == [4, 8, 10]
    before = {"loss_before": 9.0, "judged_before": {"exact_match": 0.0}}
    assert store.notes[4] == {"train_loss": 5.0, **before, "tokens": 5400, "train_seconds": 54.0}
    assert store.notes[10]["tokens"] == 6000
    assert runner.work.trained() == {"step": 10, "stopped": False}
    assert sorted(path.name for path in runner.work.checkpoints.iterdir()) == ["10"]


def test_a_request_to_stop_reaches_the_trainer_and_its_last_checkpoint_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, watch, store = watched_training(tmp_path, monkeypatch, waits=True)
    watch_once = Watch.__call__

    def told_to_stop_at_step_9(self: Watch) -> None:
        watch_once(self)
        if 9 in self._reports and not stopped:
            stopped.append(True)
            raise Stopped("preempted")

    stopped: list[bool] = []
    monkeypatch.setattr(Watch, "__call__", told_to_stop_at_step_9)
    with pytest.raises(Stopped):
        train(runner, watch, lambda: 30)
    assert list(store.notes) == [4, 8, 9]
    assert runner.work.trained() is None  # the next attempt trains on


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was just opened
def test_a_request_to_stop_at_any_instruction_of_the_watch_loses_no_line_and_no_checkpoint(tmp_path: Path) -> None:
    def train(stop: StopAt) -> dict[int, dict[str, Any]]:
        """Five steps and two checkpoints; the notes of the checkpoints that reached the store."""
        with TemporaryDirectory(dir=tmp_path) as directory:
            work, store = Work(Path(directory)), Store()
            work.begin(spec(checkpoint_steps=2).model_dump(mode="json", by_alias=True), [])
            watch = Watch(work, cast("Any", store), Reporter(JOB, Redactor(), Clients()), 2, {"tokens": 5000})
            append_lines(work.progress, start_line(0, 5) | {"loss_before": 9.0}, *map(step_line, (1, 2, 3)))
            (work.checkpoints / "2").mkdir(parents=True)
            stop.call(watch)
            append_lines(work.progress, *map(step_line, (4, 5)))
            (work.checkpoints / "5").mkdir()
            watch.save_last()
        return store.notes

    *stopped, whole = stopped_everywhere(train, watch_module)
    assert list(whole) == [2, 5]
    assert len(stopped) > 100
    assert [place for place, notes in enumerate(stopped) if notes != whole] == []


@pytest.mark.parametrize(
    ("longest", "tpu", "expected"),
    [
        (1, True, 128),
        (129, True, 256),
        (512, True, 512),
        (513, True, 1024),
        (640, True, 1024),  # splash attention's blocks of 512 tokens do not divide 640, 768 or 896
        (4096, True, 4096),
        (4097, True, 4608),
        (513, False, 528),
    ],
)
def test_sequences_have_a_length_that_the_kernel_takes(longest: int, tpu: bool, expected: int) -> None:
    assert padded_length(longest, tpu) == expected


def test_the_loss_is_compared_on_rows_that_a_cpu_computes_in_minutes() -> None:
    assert probe_rows([50] * 100) == 64
    assert probe_rows([4096] * 100) == 2
    assert probe_rows([100_000]) == 1


def test_admission_knows_the_families_that_are_converted() -> None:
    assert set(KNOWN_FAMILIES) == set(FAMILIES)
