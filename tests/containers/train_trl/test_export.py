"""The export's parts on tiny models of the real classes: merge, prompts, comparison."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from containers.common.errors import JobError
from containers.train_trl import export
from dropforge.rows import Row
from dropforge.spec import JobSpec, parse_spec

from .. import same_class
from ..conftest import ROOT, job_spec
from ..lazy import Lazy

peft, safetensors, torch, transformers = Lazy("peft"), Lazy("safetensors.torch"), Lazy("torch"), Lazy("transformers")
merge, parity, trainer = (Lazy(f"containers.train_trl.{name}") for name in ("merge", "parity", "trainer"))

FAMILIES = ("gemma3", "gemma1", "qwen3", "llama31")

# PEFT uses a name that transformers will remove; the trainer ignores such warnings, too.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def base_of(family: same_class.Family) -> Path:
    return same_class.make(ROOT / "build" / "same_class", family)


def job(**training: Any) -> JobSpec:
    return parse_spec(json.dumps(job_spec(training=training)).encode())


def adapted(base: Path, checkpoint: Path, **training: Any) -> Path:
    """Save an adapter with random weights on `base`, where the trainer would leave it."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = trainer.lora_config(job(**training), model)
    assert config is not None
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(checkpoint)
    return checkpoint


def logits(model: Any, tokenizer: Any) -> Any:
    ids = tokenizer("how many orders have amount above 7?", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return model(input_ids=ids).logits


@pytest.mark.parametrize(("family", "stabilised"), [*((family, False) for family in FAMILIES), ("gemma3", True)])
def test_the_merge_equals_peft_s_bit_for_bit(family: same_class.Family, stabilised: bool, tmp_path: Path) -> None:
    base = base_of(family)
    checkpoint = adapted(base, tmp_path / "checkpoint", adapter={"type": "lora", "r": 8, "use_rslora": stabilised})
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or "{{ messages[0]['content'] }}"
    export.save(base, checkpoint, tokenizer, tmp_path / "export", job())

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(model, checkpoint).merge_and_unload(safe_merge=True).state_dict()
    served = export.reload(tmp_path / "export", None, job())
    assert type(served) is type(model)
    assert served.dtype == torch.bfloat16
    actual = served.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.to(torch.bfloat16)), name
    unmerged = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert not torch.equal(logits(served, tokenizer), logits(unmerged, tokenizer))


def test_only_the_language_layers_of_a_model_that_sees_are_trained() -> None:
    for type_ in ("lora", "none"):
        model = transformers.AutoModelForCausalLM.from_pretrained(base_of("gemma3"))
        trainer.freeze_other_parts(model)
        config = trainer.lora_config(
            job(adapter={"type": type_} if type_ == "none" else {"type": type_, "r": 4}), model
        )
        names = trainer.trained_parameters(peft.get_peft_model(model, config) if config else model)
        assert names
        assert not [name for name in names if "language_model" not in name]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_an_adapter_that_cannot_be_merged_is_refused_before_the_training(tmp_path: Path) -> None:
    base = base_of("qwen3")
    for module in ("lm_head", "embed_tokens"):
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        adapter = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", module]))
        with pytest.raises(JobError, match=rf"target_modules includes '[a-z.]*{module}'"):
            merge.check_adapter(base, trainer.trained_parameters(adapter))
    adapter = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, target_modules=["q_proj"])
    )
    merge.check_adapter(base, trainer.trained_parameters(adapter))
    quantised = tmp_path / "quantised"
    shutil.copytree(base, quantised)
    tensors = safetensors.load_file(quantised / "model.safetensors")
    for name in tensors:
        if "q_proj" in name:
            tensors[name] = tensors[name].to(torch.int8)
    safetensors.save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(JobError, match="have the type I8"):
        merge.check_adapter(quantised, trainer.trained_parameters(adapter))
    (quantised / "model.safetensors").unlink()
    with pytest.raises(JobError, match="no weights in the safetensors format"):
        merge.check_adapter(quantised, trainer.trained_parameters(adapter))


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    checkpoint = adapted(base_of("gemma1"), tmp_path / "checkpoint")
    tensors = safetensors.load_file(checkpoint / merge.ADAPTER)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = float("inf")
    safetensors.save_file(tensors, checkpoint / merge.ADAPTER)
    (tmp_path / "model").mkdir()
    with pytest.raises(JobError, match=r"not finite.*\n?") as caught:
        merge.merge_adapter(base_of("gemma1"), checkpoint, tmp_path / "model")
    assert "learning_rate" in caught.value.hint
    (tmp_path / "adapter").mkdir()
    with pytest.raises(JobError, match="not finite"):
        merge.copy_adapter(checkpoint, tmp_path / "adapter")
    shutil.copytree(base_of("gemma1"), tmp_path / "whole")
    file = merge.weight_files(tmp_path / "whole")[0]
    tensors = safetensors.load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = 1e5  # more than 16 bits of this type hold
    safetensors.save_file(tensors, file)
    with pytest.raises(JobError, match=f"{name} has numbers that are not finite"):
        merge.cast(tmp_path / "whole", tmp_path / "model", torch.float16)


def test_a_whole_model_is_written_in_the_precision_of_its_base(tmp_path: Path) -> None:
    """Full fine-tuning trains in 32 bits. The shards' files, names and shapes stay."""
    checkpoint = tmp_path / "checkpoint"
    model = transformers.AutoModelForCausalLM.from_pretrained(base_of("llama31"), dtype=torch.float32)
    model.save_pretrained(checkpoint, max_shard_size="200KB")
    (tmp_path / "model").mkdir()
    merge.cast(checkpoint, tmp_path / "model", torch.bfloat16)
    shutil.copy(base_of("llama31") / "config.json", tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16)), name


def test_the_comparison_passes_a_good_export_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    base, spec = base_of("llama31"), job()
    checkpoint = adapted(base, tmp_path / "checkpoint")
    (tmp_path / "export" / "model").mkdir(parents=True)
    shutil.copy(base / "config.json", tmp_path / "export" / "model")
    merge.merge_adapter(base, checkpoint, tmp_path / "export" / "model")
    rows = [list(range(start, start + 40)) for start in range(20, 60, 10)]
    trained = parity.log_probabilities(export.trained_model(base, checkpoint, None, spec), rows)
    served = export.reload(tmp_path / "export", None, spec)
    assert parity.check(trained, served, rows) < parity.DIVERGENCE
    with pytest.raises(JobError, match="probabilities is nan; expected a finite number"):
        parity.check(torch.full_like(trained, math.nan), served, rows)
    unmerged = transformers.AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(JobError, match="diverge by"):
        parity.check(trained, unmerged, rows)
    config = json.loads((checkpoint / merge.ADAPTER_CONFIG).read_text())
    (checkpoint / merge.ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * 0.5}))
    merge.merge_adapter(base, checkpoint, tmp_path / "export" / "model")
    with pytest.raises(JobError, match="diverge by"):
        parity.check(trained, export.reload(tmp_path / "export", None, spec), rows)


@pytest.mark.parametrize(
    ("serve", "kept"),
    [({}, False), ({"sampling": "base_model"}, True), (None, True)],
    ids=["greedy", "base_model", "no endpoint"],
)
def test_the_base_s_sampling_defaults_survive_only_if_the_spec_says_so(
    serve: dict[str, Any] | None, kept: bool, tmp_path: Path
) -> None:
    """The evaluation is greedy. The base has do_sample, a temperature and top_k; all its last tokens stay."""
    from containers.common.chat import load_tokenizer

    base = base_of("qwen3")
    tokenizer = load_tokenizer(str(base), trust_remote_code=False)
    endpoint = None if serve is None else {"type": "cloud_run", "ttl": "1h", **serve}
    spec = parse_spec(json.dumps(job_spec(serve=endpoint)).encode())
    export.save(base, adapted(base, tmp_path / "checkpoint"), tokenizer, tmp_path / "export", spec)
    before, after = (
        json.loads((directory / "generation_config.json").read_text())
        for directory in (base, tmp_path / "export" / "model")
    )
    assert {"do_sample", "temperature", "top_k"} <= before.keys()
    assert ({"do_sample", "temperature", "top_k"} <= after.keys()) is kept
    assert ({"temperature", "top_k"} & after.keys() != set()) is kept
    assert set(before["eos_token_id"]) <= set(after["eos_token_id"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_is_compared_with_its_files_in_every_bit(family: same_class.Family, tmp_path: Path) -> None:
    """Names in a class and in its files differ (Gemma 3), and a file may be one of several shards."""
    base = tmp_path / "model"
    shutil.copytree(base_of(family), base)
    served = export.load(base, None, job())
    saved = [name for path in merge.weight_files(base) for name in safetensors.load_file(path)]
    assert export.check_weights(tmp_path, served) == len(saved)
    parameter = next(parameter for name, parameter in served.named_parameters() if name.endswith("v_proj.weight"))
    parameter.data[0, 0] += 1
    with pytest.raises(JobError, match=r"the loaded model has another .* than the saved one"):
        export.check_weights(tmp_path, served)


def test_a_tokenizer_that_changed_on_the_way_is_refused(tmp_path: Path) -> None:
    from containers.common.chat import load_tokenizer
    from dropforge.rows import Row

    tokenizer = load_tokenizer(str(base_of("llama31")), trust_remote_code=False)
    row = Row(({"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}))
    tokenizer.save_pretrained(tmp_path / "model")
    export.check_prompts(tmp_path, tokenizer, [row, Row((), "plain text")], job())
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("bos_token", "''"))
    with pytest.raises(JobError, match="makes other tokens of a prompt"):
        export.check_prompts(tmp_path, tokenizer, [row], job())


def published(tmp_path: Path, **generation: Any) -> Path:
    """A base whose generation_config.json has these values."""
    shutil.copytree(base_of("llama31"), tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **generation}))
    return tmp_path / "base"


def test_a_temperature_without_do_sample_is_no_reason_to_lose_a_model(tmp_path: Path) -> None:
    """transformers loads such a file and refuses to save it with another token that ends an answer."""
    from containers.common.chat import load_tokenizer

    base = published(tmp_path, temperature=0.6, top_p=0.9)
    loaded = transformers.GenerationConfig.from_pretrained(base)
    loaded.eos_token_id = [1, 2]
    with pytest.raises(ValueError, match="temperature"):
        loaded.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(base), trust_remote_code=False)
    export.save_beside_weights(base, tokenizer, tmp_path / "model", job())
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert not {"temperature", "top_p"} & set(saved)
    sampled = published(tmp_path / "sampled", temperature=0.6, do_sample=True)
    assert export.generation_settings(sampled, job()).temperature == 0.6


def test_what_the_export_cannot_save_is_refused_before_the_training(tmp_path: Path) -> None:
    from containers.common.chat import load_tokenizer

    base = published(tmp_path)
    tokenizer = load_tokenizer(str(base), trust_remote_code=False)
    question = {"role": "user", "content": "how many cars?"}
    rows = [Row((question, {"role": "assistant", "content": "select 1"}))]
    export.rehearse(base, tokenizer, rows, tmp_path / "rehearsal", job())
    assert not (tmp_path / "rehearsal").exists()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained = lambda directory: load_tokenizer(str(base), False).save_pretrained(directory)
    with pytest.raises(JobError, match="the exported tokenizer makes other tokens of a prompt"):
        export.rehearse(base, tokenizer, rows, tmp_path / "other", job())
    tokenizer.save_pretrained = lambda directory: json.dumps(object())
    with pytest.raises(JobError, match="cannot be saved") as caught:
        export.rehearse(base, tokenizer, rows, tmp_path / "none", job())
    assert "nothing was trained" in caught.value.hint


@pytest.mark.parametrize("adapter", [{"type": "lora"}, {"type": "qlora", "use_rslora": True}], ids=["lora", "qlora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_zeros_is_saved_merged_and_loaded_before_the_training(
    family: same_class.Family, adapter: dict[str, Any], tmp_path: Path
) -> None:
    export.rehearse_adapter(base_of(family), tmp_path, job(adapter={"r": 4, **adapter}))
    saved = safetensors.load_file(tmp_path / "adapter" / merge.ADAPTER)
    assert saved
    assert not any(tensor.any() for tensor in saved.values())
    config = json.loads((tmp_path / "adapter" / merge.ADAPTER_CONFIG).read_text())
    assert config["base_model_name_or_path"] == job().model.source


def test_an_adapter_that_the_export_could_not_save_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = job(adapter={"type": "lora", "r": 4, "target_modules": ["no_such_layer"]})
    with pytest.raises(JobError, match="no_such_layer") as caught:
        export.rehearse_adapter(base_of("qwen3"), tmp_path / "nowhere", nowhere)
    assert "nothing was trained" in caught.value.hint
    lora = job(adapter={"type": "lora", "r": 4})
    other = tmp_path / "other"
    shutil.copytree(base_of("qwen3"), other)
    tensors = safetensors.load_file(other / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name][1:].contiguous()
    safetensors.save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(JobError, match=r"no weights of the shape .*q_proj") as caught:
        export.rehearse_adapter(other, tmp_path / "shape", lora)
    assert "nothing was trained" in caught.value.hint
    monkeypatch.setattr("containers.train_trl.merge.copy_adapter", lose_a_tensor)
    with pytest.raises(JobError, match="is loaded without 1 of its"):
        export.rehearse_adapter(base_of("qwen3"), tmp_path / "lost", lora)


def lose_a_tensor(checkpoint: Path, directory: Path) -> None:
    tensors = safetensors.load_file(checkpoint / merge.ADAPTER)
    tensors.popitem()
    safetensors.save_file(tensors, directory / merge.ADAPTER, {"format": "pt"})


def test_an_older_template_of_a_processor_is_not_exported(tmp_path: Path) -> None:
    """transformers would read it before the template of the training."""
    from containers.common.chat import load_tokenizer

    base = published(tmp_path)
    (base / "chat_template.json").write_text(json.dumps({"chat_template": "another"}))
    tokenizer = load_tokenizer(str(base), False, "{{ messages[0].content }}{{ eos_token }}")
    export.save_beside_weights(base, tokenizer, tmp_path / "model", job())
    assert not (tmp_path / "model" / "chat_template.json").exists()
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == tokenizer.chat_template
