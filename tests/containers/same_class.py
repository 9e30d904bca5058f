"""Tiny models of the real models' classes: their architecture, tokenizer, chat template, files and odd details.

The weights are random. What they compute means nothing; that they load, train, shard, merge and save as the real models
do is the purpose. The details are those of the public configurations: google/gemma-3-12b-it (a vision tower, processor
files, an embedding larger than the vocabulary), google/gemma-2b (no chat template), Qwen/Qwen3-4B (a template with
thoughts) and meta-llama/Llama-3.1-8B-Instruct (three tokens that end an answer, no padding token, untied embeddings).
The chat templates are TRL's copies of the originals.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Family = Literal["gemma3", "gemma1", "qwen3", "llama31"]

CORPUS = [
    "CREATE TABLE orders (amount INT, city TEXT)\nHow many orders have amount above 7?",
    "SELECT COUNT(*) FROM orders WHERE amount > 7\nselect name from users order by age limit 10;",
    "Question: user\nContext: model\nassistant\nsystem\n0123456789",
] * 20
GEMMA_NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")  # vLLM's Gemma 3 looks these up as single tokens
GEMMA_IMAGE = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *GEMMA_TURNS, *GEMMA_IMAGE.values())
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA_STOPS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    *LLAMA_STOPS,
)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def make(cache: Path, family: Family) -> Path:
    """The model's directory below `cache`, created if missing: its name contains a digest of this file."""
    import torch

    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    directory = cache / f"{family}-{digest}"
    if directory.is_dir():
        return directory
    temporary = cache / f".{family}-{digest}.{os.getpid()}"
    temporary.mkdir(parents=True)
    torch.manual_seed(0)
    _FAMILIES[family](temporary)
    try:
        temporary.rename(directory)
    except OSError:  # another process created it first
        shutil.rmtree(temporary)
    return directory


def _gemma3(directory: Path) -> None:
    """A language model below a vision tower; sliding windows; an embedding that is larger than the vocabulary."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GenerationConfig

    tokenizer = _gemma_tokenizer(_template("gemma3"), extra_special_tokens=GEMMA_IMAGE)
    stops = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    text = SIZES | {
        "model_type": "gemma3_text",
        "vocab_size": len(tokenizer) + 64,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    }
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA_IMAGE.items()}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, eos_token_id=stops, **ids)
    generation = GenerationConfig(bos_token_id=2, eos_token_id=stops, pad_token_id=0, do_sample=True, top_k=64)
    _save(Gemma3ForConditionalGeneration(config), tokenizer, generation, directory)
    size, half = {"height": 56, "width": 56}, [0.5, 0.5, 0.5]
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "do_resize": True,
        "size": size,
        "do_normalize": True,
        "image_mean": half,
        "image_std": half,
        "image_seq_length": 4,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    (directory / "processor_config.json").write_text(json.dumps(processor))


def _gemma1(directory: Path) -> None:
    """No chat template, one key and value head, several shards."""
    from transformers import GemmaConfig, GemmaForCausalLM, GenerationConfig

    tokenizer = _gemma_tokenizer(None)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_key_value_heads": 1}
    config = GemmaConfig(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    generation = GenerationConfig(bos_token_id=2, eos_token_id=1, pad_token_id=0)
    _save(GemmaForCausalLM(config), tokenizer, generation, directory, shard_size="200KB")


def _qwen3(directory: Path) -> None:
    """A template with thoughts, an embedding that is larger than the vocabulary, no first token, two last tokens."""
    from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Qwen2Tokenizer(
        **_vocabulary(_byte_level(QWEN_SPECIAL)), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    _add_plain(tokenizer, QWEN_PLAIN)
    tokenizer.chat_template = _template("qwen3")
    turn, end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    sizes = {**SIZES, "vocab_size": len(tokenizer) + 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, tie_word_embeddings=True, bos_token_id=end, eos_token_id=turn)
    generation = GenerationConfig(
        bos_token_id=end, eos_token_id=[turn, end], pad_token_id=end, do_sample=True, temperature=0.6, top_k=20
    )
    _save(Qwen3ForCausalLM(config), tokenizer, generation, directory)


def _llama31(directory: Path) -> None:
    """Three last tokens, no padding token, a first token from the post-processor, untied embeddings, several shards."""
    from tokenizers import processors
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = _byte_level(LLAMA_SPECIAL)
    begin = LLAMA_SPECIAL[0]
    raw.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=begin, eos_token="<|eot_id|>", model_max_length=2048
    )
    tokenizer.chat_template = _template("llama3_1")
    stops = tokenizer.convert_tokens_to_ids(list(LLAMA_STOPS))
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    sizes = {**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=False, bos_token_id=0, eos_token_id=stops)
    generation = GenerationConfig(bos_token_id=0, eos_token_id=stops, do_sample=True, temperature=0.6, top_p=0.9)
    _save(LlamaForCausalLM(config), tokenizer, generation, directory, shard_size="200KB")


def _save(model: Any, tokenizer: Any, generation: Any, directory: Path, shard_size: str = "5GB") -> None:
    import torch

    model.generation_config = generation
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size=shard_size)
    tokenizer.save_pretrained(directory)


def _template(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def _gemma_tokenizer(chat_template: str | None, **options: Any) -> Any:
    """Like SentencePiece, with bytes for unknown characters."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import GemmaTokenizer

    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    _train(raw, (*GEMMA_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))), [])
    tokenizer = GemmaTokenizer(**_vocabulary(raw), model_max_length=2048, **options)
    _add_plain(tokenizer, GEMMA_NEWLINES)
    tokenizer.add_special_tokens({"additional_special_tokens": list(GEMMA_TURNS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = chat_template
    return tokenizer


def _byte_level(special: tuple[str, ...]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    _train(raw, special, pre_tokenizers.ByteLevel.alphabet())
    return raw


def _train(raw: Any, special: tuple[str, ...], alphabet: list[str]) -> None:
    from tokenizers import trainers

    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)


def _vocabulary(raw: Any) -> dict[str, Any]:
    model = json.loads(raw.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def _add_plain(tokenizer: Any, texts: tuple[str, ...]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])


_FAMILIES: dict[Family, Callable[[Path], None]] = {
    "gemma3": _gemma3,
    "gemma1": _gemma1,
    "qwen3": _qwen3,
    "llama31": _llama31,
}
