"""The plan's bytes of activations against the tensors that autograd really saves, on the real models' classes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from containers.train_trl.plan import saved_bytes, shape_of
from containers.train_trl.trainer import lora_config
from dropforge.spec import JobSpec, parse_spec

from .. import same_class
from ..conftest import ROOT, job_spec

# PEFT uses a name that transformers will remove; the trainer ignores such warnings, too.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LAYERS, TOKENS = (2, 4), (256, 512)


def model_of(directory: str, layers: int, spec: JobSpec) -> Any:
    """A model of the family with so many layers, as the trainer would have it on a GPU: the base in 16 bits."""
    config = AutoConfig.from_pretrained(directory)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"] * layers
    whole = spec.training.adapter.type == "none"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if whole else torch.bfloat16)
    if whole:
        return model.train()
    model = get_peft_model(model, lora_config(spec, model))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.enable_input_require_grads()
    return model.train()


def bytes_saved(model: Any, tokens: int) -> int:
    """The bytes that a forward pass keeps for the backward pass; a storage counts once, parameters do not."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(tokens).remainder(300).unsqueeze(0), logits_to_keep=1)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("adapter", [{"type": "lora"}, {"type": "lora", "dropout": 0.1}, {"type": "none"}])
@pytest.mark.parametrize("family", ["gemma3", "gemma1", "qwen3", "llama31"])
def test_the_plan_counts_the_bytes_that_a_layer_saves(family: same_class.Family, adapter: dict[str, Any]) -> None:
    directory = str(same_class.make(ROOT / "build" / "same_class", family))
    document = job_spec()
    document["training"]["adapter"] = adapter
    spec = parse_spec(json.dumps(document).encode())
    (few_short, few_long), (many_short, many_long) = (
        [bytes_saved(model_of(directory, layers, spec), tokens) for tokens in TOKENS] for layers in LAYERS
    )
    measured = (many_long - many_short - few_long + few_short) / (TOKENS[1] - TOKENS[0]) / (LAYERS[1] - LAYERS[0])
    size = 4 if adapter["type"] == "none" else 2
    assert saved_bytes(shape_of(directory, trust_remote_code=False), spec, size) == pytest.approx(measured, rel=0.02)
