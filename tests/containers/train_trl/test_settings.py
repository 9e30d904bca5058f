"""Each setting of `training` does what the same argument of plain TRL does, and a resumed training ends the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from containers.common.chat import Encoded, encode, load_tokenizer
from containers.train_trl.plan import Device, Plan, make_plan, shape_of
from dropforge.fit.memory import optimiser_bytes
from dropforge.rows import Row
from dropforge.spec import JobSpec, parse_spec

from ..conftest import job_spec
from ..lazy import Lazy

datasets, peft, torch, transformers, trl = (Lazy(name) for name in ("datasets", "peft", "torch", "transformers", "trl"))
sft, trainers = Lazy("containers.train_trl.methods.sft"), Lazy("containers.train_trl.trainer")

STEPS, ROWS, BATCH = 6, 24, 4
LORA = {"type": "lora", "r": 4, "alpha": 8}
# A setting of the spec, and TRL's arguments for the same.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "warm-up steps": ({"warmup_steps": 3}, {"warmup_steps": 3}),
    "steps in place of a share": ({"warmup_steps": 1, "warmup_ratio": 0.5}, {"warmup_steps": 1}),
    "restarts": (
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    ),
    "polynomial": (
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2, "lr_end": 1e-5}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2, "lr_end": 1e-5}},
    ),
    "inverse square root": ({"lr_scheduler_type": "inverse_sqrt"}, {"lr_scheduler_type": "inverse_sqrt"}),
    "betas": (
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    ),
    "weight decay": ({"weight_decay": 0.3, "max_grad_norm": 0.2}, {"weight_decay": 0.3, "max_grad_norm": 0.2}),
    "noise": ({"neftune_noise_alpha": 5.0}, {"neftune_noise_alpha": 5.0}),
    **{name: ({"optim": name}, {"optim": name}) for name in ("adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")},
    "adafactor": ({"optim": "adafactor"}, {"optim": "adafactor"}),
    "rank-stabilised": ({"adapter": {**LORA, "use_rslora": True}}, {"use_rslora": True}),
    "every weight in 8 bits": ({"adapter": {"type": "none"}, "optim": "adamw_8bit"}, {"optim": "adamw_8bit"}),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU"),
]


def rows() -> list[Row]:
    return [
        Row(
            (
                {"role": "user", "content": f"how many cars cost {number} in the city?"},
                {"role": "assistant", "content": f"select count from cars where price = {number * 7}"},
            )
        )
        for number in range(ROWS)
    ]


def job(settings: dict[str, Any]) -> JobSpec:
    common = {"adapter": LORA, "max_steps": STEPS, "checkpoint_steps": 3, "warmup_ratio": 0.0}
    document = job_spec(training={**common, "per_device_train_batch_size": BATCH})
    document["training"] |= settings
    return parse_spec(json.dumps(document).encode())


def ours(base: Path, spec: JobSpec, directory: Path) -> Any:
    """The trainer of the container, ready to train."""
    torch.manual_seed(spec.training.seed)
    tokenizer = load_tokenizer(str(base), False)
    encoded = encode(tokenizer, rows(), 128, "rows")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    trainers.freeze_other_parts(model)
    plan = plan_of(base, spec, encoded)
    columns = {"input_ids": encoded.input_ids, "labels": encoded.labels}
    trainer = sft.build_trainer(model, spec, columns, tokenizer, plan, directory)
    trainers.keep_precision(trainer.model, plan)
    return trainer


def plan_of(base: Path, spec: JobSpec, encoded: Encoded) -> Plan:
    device = Device("cpu", "cpu", 8 << 30, bf16=False)
    return make_plan(spec, shape_of(str(base), False), device, encoded.lengths)


def plain(base: Path, order: list[int], spec: JobSpec, directory: Path, arguments: dict[str, Any]) -> Any:
    """TRL's own trainer on the same rows in the same order, with arguments as in a person's script."""
    torch.manual_seed(spec.training.seed)

    tokenizer = load_tokenizer(str(base), False)
    encoded = encode(tokenizer, rows(), 128, "rows")
    data = [
        {"input_ids": encoded.input_ids.row(index).tolist(), "labels": encoded.labels.row(index).tolist()}
        for index in order
    ]
    stable = arguments.pop("use_rslora", False)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", use_rslora=stable
    )
    config = trl.SFTConfig(
        output_dir=str(directory),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=spec.training.learning_rate,
        **{"lr_scheduler_type": "cosine", "logging_steps": 1, "max_length": None, "save_strategy": "no", **arguments},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base),
        args=config,
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer,
        peft_config=None if spec.training.adapter.type == "none" else lora,
    )
    trainer._get_train_sampler = torch.utils.data.SequentialSampler
    return trainer


def trained(trainer: Any) -> dict[str, Any]:
    return {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]


@pytest.fixture(scope="module")
def usual(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the usual settings train, by the type of the adapter."""
    torch.set_num_threads(1)
    result = {}
    for kind, adapter in (("lora", LORA), ("none", {"type": "none"})):
        trainer = ours(base_model, job({"adapter": adapter}), tmp_path_factory.mktemp("usual"))
        trainer.train()
        result[kind] = trained(trainer)
    return result


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_trains_as_in_plain_trl_and_resumes(
    name: str, base_model: Path, usual: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    settings, arguments = SETTINGS[name]
    spec = job(settings)
    trainer = ours(base_model, spec, tmp_path / "ours")
    order = list(trainer.row_order)
    trainer.train()
    expected = plain(base_model, order, spec, tmp_path / "plain", dict(arguments))
    expected.train()
    assert_equal(trained(trainer), trained(expected))
    without = usual[spec.training.adapter.type]
    assert [name for name, tensor in trained(trainer).items() if not torch.equal(tensor, without[name])]
    resumed = ours(base_model, spec, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert_equal(trained(resumed), trained(trainer))


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "adafactor"])
def test_the_plan_counts_the_state_of_the_optimiser(name: str, base_model: Path, tmp_path: Path) -> None:
    spec = job({"adapter": {"type": "none"}, "optim": name, "max_steps": 1})
    trainer = ours(base_model, spec, tmp_path)
    trainer.train()
    # bitsandbytes' tables of the 256 values are 1 KiB for each tensor, which is much of a tiny model only.
    kept = [(key, value) for each in trainer.optimizer.state.values() for key, value in each.items()]
    state = [value for key, value in kept if torch.is_tensor(value) and not key.startswith("qmap")]
    measured = sum(tensor.numel() * tensor.element_size() for tensor in state)
    shape = shape_of(str(base_model), False)
    planned = optimiser_bytes(shape, spec.training, sum(tensor.numel() for tensor in trained(trainer).values()))
    # The plan has an upper bound for Adafactor, whose share of a matrix depends on its sides.
    assert measured <= planned * 1.05 if name == "adafactor" else measured == pytest.approx(planned, rel=0.05)
