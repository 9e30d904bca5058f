"""The plan's counts against the real models' classes: parameters, and the tensors that autograd really saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from containers.train_trl.plan import divided_map, shape_of, shape_on_meta
from dropforge.fit.known import KNOWN_MODELS
from dropforge.fit.memory import adapter_parameters, saved_bytes
from dropforge.spec import JobSpec, parse_spec

from .. import same_class
from ..conftest import ROOT, job_spec
from ..lazy import Lazy

peft, torch, transformers = Lazy("peft"), Lazy("torch"), Lazy("transformers")
trainer = Lazy("containers.train_trl.trainer")

# PEFT uses a name that transformers will remove; the trainer ignores such warnings, too.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LAYERS, TOKENS = (2, 4), (256, 512)


def model_of(directory: str, layers: int, spec: JobSpec, size: int) -> Any:
    """A model of the family with so many layers, and weights of `size` bytes: 2 for an adapter on a GPU."""
    config = transformers.AutoConfig.from_pretrained(directory)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"] * layers
    whole = spec.training.adapter.type == "none"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32 if size == 4 else torch.bfloat16)
    if whole:
        return model.train()
    model = peft.get_peft_model(model, trainer.lora_config(spec, model))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.enable_input_require_grads()
    return model.train()


def bytes_saved(model: Any, tokens: int) -> int:
    """The bytes that a forward pass keeps for the backward pass; a storage counts once, parameters do not."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(tokens).remainder(300).unsqueeze(0), logits_to_keep=1)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    ("adapter", "size"),
    [
        ({"type": "lora"}, 2),
        ({"type": "lora", "dropout": 0.1}, 2),
        ({"type": "lora"}, 4),
        ({"type": "lora", "dropout": 0.1}, 4),
        ({"type": "none"}, 4),
    ],
)
@pytest.mark.parametrize("family", ["gemma3", "gemma1", "qwen3", "llama31"])
def test_the_plan_counts_the_bytes_that_a_layer_saves(
    family: same_class.Family, adapter: dict[str, Any], size: int
) -> None:
    directory = str(same_class.make(ROOT / "build" / "same_class", family))
    document = job_spec()
    document["training"]["adapter"] = adapter
    spec = parse_spec(json.dumps(document).encode())
    (few_short, few_long), (many_short, many_long) = (
        [bytes_saved(model_of(directory, layers, spec, size), tokens) for tokens in TOKENS] for layers in LAYERS
    )
    measured = (many_long - many_short - few_long + few_short) / (TOKENS[1] - TOKENS[0]) / (LAYERS[1] - LAYERS[0])
    assert saved_bytes(shape_of(directory, trust_remote_code=False), spec.training.adapter, size) == pytest.approx(
        measured, rel=0.02
    )


@pytest.mark.parametrize("family", ["gemma3", "gemma1", "qwen3", "llama31"])
def test_the_shape_from_the_configuration_is_that_of_the_class(family: same_class.Family) -> None:
    directory = str(same_class.make(ROOT / "build" / "same_class", family))
    assert shape_of(directory, trust_remote_code=False) == shape_on_meta(directory, trust_remote_code=False)


@pytest.mark.parametrize(
    "name", ["google/gemma-2b", "google/gemma-3-12b-pt", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B"]
)
def test_the_shape_of_a_known_model_is_that_of_its_class(name: str, tmp_path: Path) -> None:
    """The real sizes, on the meta device: no weights."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS[name].config))
    assert shape_of(str(tmp_path), trust_remote_code=False) == shape_on_meta(str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize(
    "adapter", [{"type": "lora", "r": 8}, {"type": "lora", "target_modules": ["q_proj", "down_proj"]}]
)
@pytest.mark.parametrize("family", ["gemma3", "gemma1", "qwen3", "llama31"])
def test_the_plan_counts_the_parameters_of_an_adapter(family: same_class.Family, adapter: dict[str, Any]) -> None:
    directory = str(same_class.make(ROOT / "build" / "same_class", family))
    document = job_spec()
    document["training"]["adapter"] = adapter
    spec = parse_spec(json.dumps(document).encode())
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory))
    trained = sum(
        p.numel() for p in peft.get_peft_model(model, trainer.lora_config(spec, model)).parameters() if p.requires_grad
    )
    assert adapter_parameters(shape_of(directory, trust_remote_code=False), spec.training.adapter) == trained


@pytest.mark.parametrize("family", ["gemma3", "llama31"])
def test_a_model_that_a_gpu_cannot_hold_is_divided_between_it_and_the_host(family: same_class.Family) -> None:
    directory = same_class.make(ROOT / "build" / "same_class", family)
    whole = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    divided = divided_map(directory, int(0.7 * whole), 10 * whole, trust_remote_code=False)
    assert set(divided.values()) == {0, "cpu"}
    assert set(divided_map(directory, 10 * whole, 10 * whole, trust_remote_code=False).values()) == {0}
