"""From a finished checkpoint to a model that a server loads: merge, save, reload, compare."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from containers.common.chat import encode_prompt, stop_ids
from containers.common.errors import code_error, config_error
from containers.common.publish import BASE, MODEL
from dropforge.rows import Row
from dropforge.spec import JobSpec

from .plan import dtype_of, empty_model

# Files of the base that are not weights: configuration, processors, the model's own code. The tokenizer is saved anew.
COPIED = (".json", ".jinja", ".model", ".txt", ".py")
# transformers reads it before chat_template.jinja, which the tokenizer writes, and would take another template.
OLD_TEMPLATE = "chat_template.json"
# Settings of a generation that only sampling uses; transformers refuses to save them where do_sample is false.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def save(base: Path, checkpoint: Path, tokenizer: Any, directory: Path, spec: JobSpec) -> None:
    """Write model/ and, for an adapter, adapter/ below `directory`. Memory holds a few tensors at once.

    For a shared endpoint, base/ takes the place of model/: the base's weights, to which the adapter is not added.
    """
    from . import merge

    model = served_directory(directory, spec)
    save_beside_weights(base, tokenizer, model, spec)
    if spec.training.adapter.type == "none":
        merge.cast(checkpoint, model, base_dtype(base, spec))
    else:
        if shares(spec):
            merge.copy_weights(base, model)
        else:
            merge.merge_adapter(base, checkpoint, model)
        _save_adapter(checkpoint, directory / "adapter", spec)


def save_beside_weights(base: Path, tokenizer: Any, directory: Path, spec: JobSpec) -> None:
    """Write the files of an exported model that are not weights."""
    from . import merge

    directory.mkdir(parents=True)
    for path in base.iterdir():
        if path.suffix in COPIED and path.name not in (merge.INDEX, OLD_TEMPLATE):
            shutil.copy(path, directory)
    tokenizer.save_pretrained(directory)
    _save_generation_config(base, tokenizer, directory, spec)


def rehearse(base: Path, tokenizer: Any, rows: Sequence[Row], directory: Path, spec: JobSpec) -> None:
    """Do before the training what the export does, without the base's weights, and read it back. Raises JobError.

    A tokenizer, a configuration or an adapter that cannot be saved would else end the run after the training was paid
    for.
    """
    try:
        save_beside_weights(base, tokenizer, served_directory(directory, spec), spec)
    except (OSError, ValueError, TypeError) as error:
        raise config_error(
            f"the tokenizer or generation_config.json of model.source cannot be saved: {error}",
            "nothing was trained; correct these files in a copy of the model, and name the copy in model.source",
        ) from None
    check_prompts(directory, tokenizer, rows, spec)
    if spec.training.adapter.type != "none":
        rehearse_adapter(base, directory, spec)
    shutil.rmtree(directory)


def rehearse_adapter(base: Path, directory: Path, spec: JobSpec) -> None:
    """Save an adapter of zeros, merge it, and load it beside the model's class, as export and server do.

    Raises JobError.
    """
    import torch
    from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict

    from . import merge
    from .trainer import lora_config, trained_parameters

    checkpoint, saved = directory / "checkpoint", directory / "adapter"
    try:
        model = empty_model(str(base), spec.model.trust_remote_code)
        adapted = get_peft_model(model, lora_config(spec, model))
        merge.check_adapter(base, trained_parameters(adapted))
        zeros = {name: torch.zeros(each.shape) for name, each in adapted.named_parameters() if each.requires_grad}
        adapted.save_pretrained(checkpoint, state_dict=zeros, save_embedding_layers=False)
        merge.check_zero(base, checkpoint)
        _save_adapter(checkpoint, saved, spec)
        again = empty_model(str(base), spec.model.trust_remote_code)
        config = PeftConfig.from_pretrained(saved)
        config.base_model_name_or_path = None  # PEFT warns that the model's directory has another name
        loaded = get_peft_model(again, config)
        weights = load_peft_weights(str(saved), device="cpu")
        result = set_peft_model_state_dict(loaded, weights, low_cpu_mem_usage=True)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise config_error(
            f"an adapter of this model cannot be saved, merged and loaded: {type(error).__name__}: {error}",
            "nothing was trained; name linear layers in training.adapter.target_modules, or use 'all-linear'",
        ) from None
    if lost := [*result.unexpected_keys, *(name for name in result.missing_keys if name in zeros)]:
        raise config_error(
            f"a saved adapter is loaded without {len(lost)} of its {len(zeros)} tensors, {lost[0]} among them",
            "nothing was trained; the model's class renames its modules, so that no adapter of it can be served",
        )


def shares(spec: JobSpec) -> bool:
    """Whether the model is its base with the adapter beside it, for an endpoint of many adapters."""
    return spec.serve is not None and spec.serve.share


def served_directory(directory: Path, spec: JobSpec) -> Path:
    """The part of an export that a server loads as a model."""
    return directory / (BASE if shares(spec) else MODEL)


def trained_model(base: Path, checkpoint: Path, device_map: Any, spec: JobSpec) -> Any:
    """The base with the adapter beside it, as the training left them: what the export is compared with."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype="auto", device_map=device_map, trust_remote_code=spec.model.trust_remote_code
    )
    return PeftModel.from_pretrained(model, checkpoint).eval()


def reload(directory: Path, device_map: Any, spec: JobSpec) -> Any:
    """The saved model, loaded as a server loads it: for a shared endpoint, the base with the adapter beside it."""
    model = load(served_directory(directory, spec), device_map, spec)
    if not shares(spec):
        return model
    from peft import PeftModel

    # The base's own class, whose layers the adapter has changed.
    return PeftModel.from_pretrained(model, directory / "adapter").eval().base_model.model


def load(directory: Path, device_map: Any, spec: JobSpec) -> Any:
    """The model of a directory, in the precision of its files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype="auto",
        device_map=device_map,
        trust_remote_code=spec.model.trust_remote_code,
    )
    return model.eval()


def check_weights(directory: Path, model: Any) -> int:
    """Compare the saved weights with those of the loaded model, bit for bit; return how many were compared.

    Weights that wait in host memory because a GPU has no room (the meta device) are left out. Raises JobError.
    """
    from safetensors import safe_open

    from . import merge

    loaded = {merge.file_name(name): tensor for name, tensor in model.state_dict().items()}
    compared = 0
    for path in merge.weight_files(directory / MODEL):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = loaded.get(merge.file_name(name))
                if tensor is None or tensor.device.type == "meta":
                    continue
                if not tensor.cpu().equal(file.get_tensor(name)):
                    raise code_error(
                        f"the loaded model has another {name} than the saved one",
                        "nothing was published; the export has a bug",
                    )
                compared += 1
    return compared


def check_prompts(directory: Path, tokenizer: Any, rows: Sequence[Row], spec: JobSpec) -> None:
    """Raise JobError unless the saved tokenizer makes the token ids of the training's tokenizer."""
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(
        served_directory(directory, spec), trust_remote_code=spec.model.trust_remote_code
    )
    for row in rows:
        expected, actual = (
            encode_prompt(each, row.prompt, row.tools) if row.messages else list(each(row.text)["input_ids"])
            for each in (tokenizer, saved)
        )
        if expected != actual:
            raise code_error(
                f"the exported tokenizer makes other tokens of a prompt: {actual[:8]} where the training had "
                f"{expected[:8]} (the first of {len(actual)} and {len(expected)})",
                "nothing was published; the export has a bug, or the tokenizer does not load as it was saved",
            )


def base_dtype(base: Path, spec: JobSpec) -> Any:
    """The precision of the base model's weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base, trust_remote_code=spec.model.trust_remote_code)
    return config.dtype or dtype_of("float32")


def _save_generation_config(base: Path, tokenizer: Any, directory: Path, spec: JobSpec) -> None:
    """The base's settings, with every token that ends an answer of the trained model.

    The evaluation is greedy. The base's sampling defaults stay only if the endpoint shall have them, or if there is
    no endpoint.
    """
    from transformers import GenerationConfig

    settings = generation_settings(base, spec)
    if spec.serve is not None and spec.serve.sampling == "greedy":
        settings = GenerationConfig(bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id)
    settings.eos_token_id = stop_ids(tokenizer, settings)
    settings.pad_token_id = tokenizer.pad_token_id
    settings.save_pretrained(directory)


def generation_settings(base: Path, spec: JobSpec) -> Any:
    """The base's settings of a generation, without values that its other values leave without effect.

    Models are published with a temperature and no do_sample. transformers loads such a file, and refuses to save it.
    """
    from transformers import AutoConfig, GenerationConfig

    if (base / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(base)
    else:
        config = AutoConfig.from_pretrained(base, trust_remote_code=spec.model.trust_remote_code)
        settings = GenerationConfig.from_model_config(config)
    if not settings.do_sample:
        for name in SAMPLING:
            setattr(settings, name, None)
    return settings


def _save_adapter(checkpoint: Path, directory: Path, spec: JobSpec) -> None:
    from . import merge

    directory.mkdir()
    merge.copy_adapter(checkpoint, directory)
    config = json.loads((checkpoint / merge.ADAPTER_CONFIG).read_text())
    config["base_model_name_or_path"] = spec.model.source  # not the download directory
    config["revision"] = None if spec.model.source.startswith("gs://") else spec.model.revision
    (directory / merge.ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
