"""Several processes: two real FSDP2 ranks on gloo under `accelerate launch`, against one process on the same rows."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.patience import TRAIN_SECONDS

from containers.common.token_rows import TokenRows
from dropforge.base.errors import ErrorClass
from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import COMPLETE, checkpoints, download_prefix, upload_checkpoint, verify_manifest
from dropforge.spec import parse_spec

from ..conftest import RUN_KEY

# A test waits for several attempts: its own, and attempts that tests share.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

RUNS, DATA = "runs-bucket", "data-bucket"
WHOLE = {"adapter": {"type": "none"}, "learning_rate": 1e-3}
LONG = {"max_steps": 40, "checkpoint_steps": 20, "per_device_train_batch_size": 8}
# Only the order of the 32-bit sums differs (measured: 2e-8).
ONE_PROCESS_TOLERANCE = 1e-5
RESUME_TOLERANCE = 1e-4

Spec = Callable[..., dict[str, Any]]


def test_two_ranks_lose_what_one_process_loses(two_ranks: Any, uninterrupted: Any, cloud: Any) -> None:
    (single, one_manifest), (double, two_manifest) = uninterrupted, two_ranks
    expected, actual = losses(cloud, single.run), losses(cloud, double.run)
    assert len(actual) == 4
    assert actual == pytest.approx(expected, abs=ONE_PROCESS_TOLERANCE)
    for name in ("loss", "loss_before"):
        assert two_manifest.metrics[name] == pytest.approx(one_manifest.metrics[name], abs=ONE_PROCESS_TOLERANCE)
    for name in ("steps", "tokens", "rows_train", "rows_eval", "exact_match_before"):
        assert two_manifest.metrics[name] == one_manifest.metrics[name], name


def test_one_rank_reports(two_ranks: Any, events: Any, series: Any) -> None:
    attempt, manifest = two_ranks
    sent = events(attempt.run)
    kinds = [event.type for event in sent]
    assert kinds[0] == "started"
    assert {kind: kinds.count(kind) for kind in ("started", "checkpoint", "succeeded")} == {
        "started": 1,
        "checkpoint": 2,
        "succeeded": 1,
    }
    assert sent[0].device == "2 x cpu"
    (succeeded,) = [event for event in sent if event.type == "succeeded"]
    assert succeeded.metrics == manifest.metrics
    progress = series(attempt.run)
    assert progress.step == sorted(set(progress.step))
    assert progress.held_out_loss[-1] == pytest.approx(manifest.metrics["loss"], rel=0.1)


def test_checkpoints_have_the_shards_of_both_ranks(two_ranks: Any, cloud: Any) -> None:
    attempt, _ = two_ranks
    saved = checkpoints(cloud.client, RUNS, attempt.run, RUN_KEY)
    assert [checkpoint.step for checkpoint in saved] == [40, 20]
    paths = {file.path for file in saved[1].files}
    for rank in (0, 1):
        shards = {f"pytorch_model_fsdp_0/__{rank}_0.distcp", f"optimizer_0/__{rank}_0.distcp", f"rng_state_{rank}.pth"}
        assert shards <= paths
    assert '"wrapped": ["Gemma3DecoderLayer"]' in attempt.output


def test_the_exported_model_loads_and_answers(two_ranks: Any, cloud: Any, trainer: Any, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    attempt, manifest = two_ranks
    assert manifest.metrics["exact_match"] >= 0.5
    assert verify_manifest(cloud.client, RUNS, manifest) == []
    download_prefix(cloud.client, f"gs://{RUNS}/models/{attempt.run}/{manifest.serve_path}", tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(model).__name__ == "Gemma3ForCausalLM"
    sample = trainer.samples(attempt.run)[0]
    inputs = tokenizer.apply_chat_template(
        sample["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True).strip() == sample["after"]


def test_killed_and_stopped_and_resumed_by_other_ranks_it_ends_with_the_same_loss(
    uninterrupted: Any, trainer: Any, spec: Spec, cloud: Any, events: Any, tmp_path: Path
) -> None:
    single, expected = uninterrupted
    # One process trained 20 steps, the first epoch. Two ranks continue, and the test kills the second rank.
    run, document = f"reshard-{single.run}", spec(training={**LONG, "checkpoint_steps": 1})
    copy_checkpoint(cloud, single.run, run, tmp_path, save_steps=1)  # saving makes steps slow enough to interrupt
    first = trainer.start(document, run, processes=2)
    wait_for(lambda: newest_step(cloud, run) > 20)
    rank_processes(first.process.pid)[1].send_signal(signal.SIGKILL)
    assert first.wait() == 70, first.output
    sent = events(run)
    assert sent[0].resumed_step == 20
    assert (sent[-1].type, sent[-1].error_class) == ("failed", ErrorClass.INFRASTRUCTURE)

    resumed = newest_step(cloud, run)
    second = trainer.start(document, run, attempt=2, processes=2)
    wait_for(lambda: newest_step(cloud, run) > resumed)
    second.kill(signal.SIGTERM)
    assert second.wait() == 75, second.output
    sent = [event for event in events(run) if event.attempt == 2]
    assert sent[0].resumed_step == resumed
    assert sent[-1].type == "preempted"
    assert resumed < sent[-1].step == newest_step(cloud, run) < 40

    third = trainer.start(document, run, attempt=3)
    assert third.wait() == 0, third.output
    assert [checkpoint.step for checkpoint in checkpoints(cloud.client, RUNS, run, RUN_KEY)] == [40, 39]
    metrics = trainer.manifest(run).metrics
    for name in ("loss", "loss_before"):
        assert metrics[name] == pytest.approx(expected.metrics[name], abs=RESUME_TOLERANCE), name
    for name in ("steps", "tokens", "exact_match", "exact_match_before"):
        assert metrics[name] == expected.metrics[name], name


def test_a_rank_that_hears_no_signal_does_not_cost_the_last_event(trainer: Any, spec: Spec, events: Any) -> None:
    attempt = trainer.start(spec(training=LONG), processes=2, DROPFORGE_GRACE_SECONDS="5")
    attempt.wait_for('"prepared"')
    deaf = rank_processes(attempt.process.pid)
    deaf[1].send_signal(signal.SIGSTOP)  # as if it waited in a collective
    attempt.kill(signal.SIGTERM)
    try:
        attempt.wait_for("ranks did not end in")  # the launcher alone would wait for 30 s, and kill them
        assert attempt.process.wait(TRAIN_SECONDS) == 75  # a rank keeps the output open
    finally:
        for rank in filter(psutil.Process.is_running, deaf):  # the end of a container would end them
            rank.kill()
    assert [event.type for event in events(attempt.run)] == ["started", "preempted"]


def test_a_rank_that_waits_for_a_silent_rank_ends_all_ranks_with_its_stacks(
    trainer: Any, spec: Spec, events: Any
) -> None:
    long = {**LONG, "max_steps": 10_000, "checkpoint_steps": 10_000}
    attempt = trainer.start(spec(training=long), processes=2, DROPFORGE_STALL_SECONDS="10")
    attempt.wait_for('"total_steps": 10000')
    silent = rank_processes(attempt.process.pid)[1]
    silent.send_signal(signal.SIGSTOP)  # it hears no SIGTERM either: accelerate kills it
    assert attempt.wait() == 70, attempt.output
    assert not silent.is_running()
    failed = events(attempt.run)[-1]
    assert (failed.type, failed.error_class) == ("failed", ErrorClass.INFRASTRUCTURE)
    assert "rank 0 stalled: no step for 1" in failed.message
    stacks = attempt.output[attempt.output.index('"severity": "ERROR", "message": "rank 0 has made no step for 1') :]
    assert re.search(r'containers/train_trl/train.py", line \d+ in train', stacks)


def test_ranks_that_would_not_be_sharded_are_refused(trainer: Any, spec: Spec, events: Any) -> None:
    attempt = trainer.start(spec(training=LONG), processes=2, DROPFORGE_LOCAL_GPUS="")
    assert attempt.wait() == 64, attempt.output
    (sent,) = events(attempt.run)
    assert (sent.type, sent.error_class) == ("failed", ErrorClass.CONFIG)
    assert "2 processes were to shard the model by FSDP2; accelerate runs MULTI_CPU" in sent.message


def test_two_machines_make_one_model(two_machines: str, trainer: Any, cloud: Any, events: Any) -> None:
    kinds = [event.type for event in events(two_machines)]
    assert (kinds.count("started"), kinds.count("succeeded")) == (1, 1)
    (checkpoint,) = checkpoints(cloud.client, RUNS, two_machines, RUN_KEY)
    assert {"optimizer_0/__1_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp", "rng_state_1.pth"} <= {
        file.path for file in checkpoint.files
    }
    manifest = trainer.manifest(two_machines)
    assert manifest.adapter_path is None
    assert manifest.metrics["loss"] < manifest.metrics["loss_before"]


def test_shards_of_a_whole_model_survive_being_one_file(
    two_machines: str, cloud: Any, base_model: Path, spec: Spec, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from containers.train_trl import reshard
    from containers.train_trl.methods.sft import build_trainer
    from containers.train_trl.plan import find_device, make_plan, shape_of

    checkpoint, plain = tmp_path / "checkpoint", str(base_model)
    download_prefix(cloud.client, checkpoints(cloud.client, RUNS, two_machines, RUN_KEY)[0].uri, checkpoint)
    weights, optimizer = read_shards(checkpoint)
    parsed = parse_spec(json.dumps(spec(training=WHOLE)).encode())
    plan = make_plan(parsed, shape_of(plain, False), find_device(), [3])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(plain), AutoTokenizer.from_pretrained(plain)
    columns = dict.fromkeys(("input_ids", "labels"), TokenRows.of([[1, 2, 3]]))
    trainer: Any = build_trainer(model, parsed, columns, tokenizer, plan, tmp_path / "trainer")
    trainer.create_optimizer()

    reshard.fit(checkpoint, trainer, sharded=False)
    assert not [path for path in checkpoint.iterdir() if path.is_dir()]
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.optimizer.load_state_dict(torch.load(checkpoint / reshard.OPTIMIZER, weights_only=True))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
        assert torch.equal(trainer.optimizer.state[parameter]["exp_avg"], optimizer["state"][name]["exp_avg"]), name

    reshard.fit(checkpoint, trainer, sharded=True)
    again, optimizer_again = read_shards(checkpoint)
    torch.testing.assert_close(again, weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer_again["state"], optimizer["state"], rtol=0, atol=0)
    assert optimizer_again["param_groups"] == optimizer["param_groups"]


def read_shards(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from containers.train_trl import reshard

    model = reshard.read_shards(checkpoint / reshard.SHARDED_MODEL)["model"]
    return model, reshard.read_shards(checkpoint / reshard.SHARDED_OPTIMIZER)["optimizer"]


def test_machines_commit_a_checkpoint_together(cloud: Any, tmp_path: Path) -> None:
    run = "parts-0123456789ab"
    stores = [store(cloud, run, machine) for machine in (0, 1)]
    for machine, saving in enumerate(stores):
        saving.launch = "this-launch"
        (tmp_path / str(machine)).mkdir()
        (tmp_path / str(machine) / f"__{machine}_0.distcp").write_text(f"shard {machine}")
    stores[0].save(10, tmp_path / "0", {"train_seconds": 1})
    assert checkpoints(cloud.client, RUNS, run, RUN_KEY) == []
    stores[1].save(10, tmp_path / "1", {})
    for saving in stores:
        saving.wait()
    assert not (tmp_path / "1").exists()  # the machine deletes its own uploaded shards
    # The rest of an incomplete upload by three ranks.
    cloud.put(RUNS, f"checkpoints/{run}/step-00000010/optimizer_0/__2_0.distcp", "of another launch")
    resumed = store(cloud, run, 1).resume(tmp_path / "resumed")
    assert resumed is not None
    assert sorted(path.name for path in resumed.iterdir()) == ["__0_0.distcp", "__1_0.distcp", "dropforge.json"]
    cloud.put(RUNS, f"checkpoints/{run}/step-00000010/__1_0.distcp", "of another launch")
    assert store(cloud, run, 0).resume(tmp_path / "again") is None


def store(cloud: Any, run: str, machine: int) -> Any:
    from containers.common.checkpoints import CheckpointStore
    from containers.common.job import Job
    from containers.common.redactor import Redactor
    from containers.common.report import Reporter
    from containers.common.world import World

    job = Job("p", run, 1, RUNS, "", None, 10, World(1, 2, machine, "host", rank=machine), RUN_KEY)
    return CheckpointStore(cloud.client, job, Reporter(job, Redactor(), Clients()))


def test_rows_come_in_an_order_that_seed_and_epoch_decide() -> None:
    from containers.train_trl.trainer import RowOrder

    def order(epoch: int, *, group: bool) -> list[int]:
        rows = RowOrder(range(100), 4, seed=7, group_by_length=group)
        rows.epoch = epoch
        return list(rows)

    for group in (True, False):
        assert order(1, group=group) == order(1, group=group) != order(0, group=group)
        assert sorted(order(1, group=group)) == list(range(100))
    assert spread(order(0, group=True)) < spread(order(0, group=False)) / 2


def spread(order: list[int]) -> int:
    """The sum of the length differences within steps of 4 rows."""
    return sum(max(order[n : n + 4]) - min(order[n : n + 4]) for n in range(0, len(order), 4))


def test_the_layers_that_are_sharded_are_those_that_the_model_names_and_has() -> None:
    import torch

    from containers.common.errors import JobError
    from containers.train_trl import ranks

    class Layer(torch.nn.Linear):
        pass

    class Tower(torch.nn.Linear):
        pass

    class Model(torch.nn.Sequential):
        _no_split_modules: tuple[str, ...] = ("Layer", "Tower", "VisionLayerThatThisModelLacks")

        def get_decoder(self) -> torch.nn.Module:
            return self[0]

    model = Model(torch.nn.Sequential(Layer(1, 1)), Tower(1, 1))
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace())))
    assert ranks.use_wrap_classes(trainer, model) == ["Layer"]
    assert trainer.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap == ["Layer"]
    Model._no_split_modules = ()
    with pytest.raises(JobError, match=r"Model names \[\] as its layers"):
        ranks.use_wrap_classes(trainer, model)


def copy_checkpoint(cloud: Any, source: str, run: str, directory: Path, save_steps: int) -> None:
    """Copy the last checkpoint but one to another run, which then saves every `save_steps` steps."""
    checkpoint = checkpoints(cloud.client, RUNS, source, RUN_KEY)[1]
    download_prefix(cloud.client, checkpoint.uri, directory)
    (directory / COMPLETE).unlink()
    state = json.loads((directory / "trainer_state.json").read_text())
    (directory / "trainer_state.json").write_text(json.dumps({**state, "save_steps": save_steps}))
    upload_checkpoint(cloud.client, RUNS, run, checkpoint.step, directory, {}, RUN_KEY)


def newest_step(cloud: Any, run: str) -> int:
    return int(checkpoints(cloud.client, RUNS, run, RUN_KEY)[0].step)


def losses(cloud: Any, run: str) -> list[float]:
    """The losses that the trainer logged, from its last checkpoint."""
    uri = checkpoints(cloud.client, RUNS, run, RUN_KEY)[0].uri.removeprefix(f"gs://{RUNS}/")
    state = json.loads(cloud.client.bucket(RUNS).blob(f"{uri}trainer_state.json").download_as_bytes())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def rank_processes(pid: int) -> list[psutil.Process]:
    """The rank processes of a container whose first process is `pid`, in order."""
    (launcher,) = psutil.Process(pid).children()
    return sorted(launcher.children(), key=lambda process: (process.create_time(), process.pid))


def wait_for(condition: Callable[[], Any], timeout: float = TRAIN_SECONDS) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout} s"
        time.sleep(0.1)
