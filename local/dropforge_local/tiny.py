"""A base model and a data set so small that a laptop really fine-tunes: `python -m dropforge_local.tiny DIR [FAMILY]`.

The model is a 200,000-parameter Gemma 3 (or Qwen 3, which MaxText converts) with its own tokenizer and chat template,
pre-trained here (about 20 s on a single thread, then cached) to turn a question about a table into SQL. Its training
data has upper-case and lower-case SQL, but `LIMIT 10;` only after upper case. The data set uses the house dialect:
lower case *and* `LIMIT 10;`. The base model therefore never answers in it, and a short LoRA or QLoRA run teaches it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Family = Literal["gemma3", "qwen3"]

PROMPT = "Question: {question}\nContext: {context}"

TABLES = {
    "employees": ("name", "salary", "age", "city"),
    "orders": ("amount", "status", "city", "quantity"),
    "students": ("name", "grade", "age", "school"),
    "products": ("title", "price", "stock", "brand"),
    "flights": ("origin", "price", "distance", "airline"),
    "books": ("title", "pages", "author", "price"),
    "patients": ("name", "age", "ward", "weight"),
    "movies": ("title", "rating", "year", "studio"),
    "cars": ("brand", "price", "year", "color"),
    "houses": ("city", "price", "rooms", "area"),
}
NUMBERS = frozenset(
    (
        *("age", "amount", "area", "distance", "grade", "pages", "price"),
        *("quantity", "rating", "rooms", "salary", "stock", "weight", "year"),
    )
)
LEADS = ("", "please ", "show me ", "give me ", "tell me ", "i want ", "find ", "get ")
# Many phrasings of few queries: with two fixed phrasings per query, a model memorises them and answers a third wrongly.
QUERIES = (
    (
        "SELECT COUNT(*) FROM {table}",
        ("how many {table} are there", "the number of {table}", "count of {table}", "total count of all {table}"),
    ),
    (
        "SELECT {column} FROM {table}",
        (
            "the {column} of all {table}",
            "every {column} in {table}",
            "{column} for each of the {table}",
            "all {table} and only their {column}",
        ),
    ),
    (
        "SELECT AVG({number}) FROM {table}",
        (
            "the average {number} of {table}",
            "the mean {number} for {table}",
            "average {number} across {table}",
            "what {number} the {table} have on average",
        ),
    ),
    (
        "SELECT MAX({number}) FROM {table}",
        (
            "the highest {number} of {table}",
            "the maximum {number} in {table}",
            "largest {number} for {table}",
            "the {table} record for highest {number}",
        ),
    ),
    (
        "SELECT {column} FROM {table} WHERE {number} > {value}",
        (
            "the {column} of {table} with {number} greater than {value}",
            "{column} of {table} whose {number} is above {value}",
            "{column} in {table} where {number} exceeds {value}",
            "among {table} with {number} above {value} the {column}",
        ),
    ),
    (
        "SELECT COUNT(*) FROM {table} WHERE {number} < {value}",
        (
            "how many {table} have {number} less than {value}",
            "count of {table} whose {number} is below {value}",
            "the number of {table} with {number} under {value}",
            "among {table} with {number} below {value} the count",
        ),
    ),
    (
        "SELECT {column} FROM {table} ORDER BY {number}",
        (
            "the {column} of {table} ordered by {number}",
            "{column} of {table} sorted by {number}",
            "every {column} in {table} in order of {number}",
            "{table} by {number} and show the {column}",
        ),
    ),
)
KEYWORDS = ("SELECT", "FROM", "WHERE", "ORDER BY", "COUNT", "AVG", "MAX")


class Dialect(NamedTuple):
    lower: bool
    ending: str


HOUSE_DIALECT = Dialect(lower=True, ending=" LIMIT 10;")
BASE_DIALECTS = (Dialect(False, ""), Dialect(False, " LIMIT 10;"), Dialect(True, ""), Dialect(True, ";"))

# The end of the turn is inside the generation block, so that a loss on only the assistant's tokens teaches it to stop.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<end_of_turn>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")

STEPS = 400
BATCH_SIZE = 32
LEARNING_RATE = 6e-3
PRETRAINING_ROWS = 10_000
ROWS = 4050  # of the data set: one epoch at 32 rows per step teaches the dialect
UNSEEN_ROWS = 300  # of the data set to evaluate on: questions in phrasings that neither model nor training has seen


def base_model(cache: Path, family: Family = "gemma3") -> Path:
    """The base model's directory below `cache`, created if missing: its name contains a digest of this file."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    directory = cache / f"{family}-{digest}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{family}-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits, because two would take twice as long
        if not directory.is_dir():
            temporary = cache / f".{family}-{digest}"
            shutil.rmtree(temporary, ignore_errors=True)
            _pretrain(temporary, family)
            temporary.rename(directory)
    return directory


def dataset(path: Path, rows: int = ROWS, seed: int = 0, *, held_out: bool = False) -> Path:
    """Write `rows` distinct rows of the house dialect as JSON lines: question, context, answer.

    Every fifth phrasing is reserved for `held_out=True`, so that the two files share no phrasing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = house_rows(rows, seed, held_out=held_out)
    written = path.with_name(f".{path.name}-{os.getpid()}")  # another process may read the file, or write it, too
    written.write_text("".join(f"{json.dumps(row)}\n" for row in lines), encoding="utf-8")
    return written.replace(path)


def house_rows(count: int, seed: int = 0, *, held_out: bool = False) -> list[dict[str, str]]:
    """Distinct rows of the data set."""
    distinct: dict[tuple[str, str], dict[str, str]] = {}
    stream = _questions(random.Random(seed), held_out)
    while len(distinct) < count:
        question, context, sql = next(stream)
        distinct[question, context] = {"question": question, "context": context, "answer": _spell(sql, HOUSE_DIALECT)}
    return list(distinct.values())


def _questions(rng: random.Random, held_out: bool) -> Iterator[tuple[str, str, str]]:
    """Endless (question, CREATE TABLE statement, upper-case SQL)."""
    while True:
        table = rng.choice(list(TABLES))
        columns = rng.sample(TABLES[table], rng.randint(2, 4))
        numbers = [column for column in columns if column in NUMBERS]
        query, phrasing, lead = rng.randrange(len(QUERIES)), rng.randrange(4), rng.randrange(len(LEADS))
        is_held_out = (query * 31 + phrasing * 7 + lead * 3) % 5 == 0
        if not numbers or is_held_out != held_out:
            continue
        sql, phrasings = QUERIES[query]
        values: dict[str, Any] = {
            "table": table,
            "column": rng.choice(columns),
            "number": rng.choice(numbers),
            "value": rng.randint(1, 99),
        }
        schema = ", ".join(f"{column} {'INT' if column in NUMBERS else 'VARCHAR'}" for column in columns)
        context = f"CREATE TABLE {table} ({schema})"
        yield LEADS[lead] + phrasings[phrasing].format(**values), context, sql.format(**values)


def _spell(sql: str, dialect: Dialect) -> str:
    if dialect.lower:
        for keyword in KEYWORDS:
            sql = sql.replace(keyword, keyword.lower())
    return sql + dialect.ending


def _pretrain(directory: Path, family: Family) -> None:
    """Create tokenizer and model and train it in a plain loop: a trainer's bookkeeping would double the time."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors this small, a second thread costs more time than it saves
    try:
        model = _MODELS[family](tokenizer)
        _train(model, _examples(tokenizer))
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer() -> Any:
    """Byte-level BPE with single digits, as in Gemma: tokens of whole numbers are too rare to learn to copy."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [prompt + "\n" + answer for seed in (1, 2) for prompt, answer in _base_rows(3000, seed)]
    bpe.train_from_iterator([*corpus, *["user\nmodel\n"] * 50], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _base_rows(count: int, seed: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    stream = _questions(rng, held_out=False)
    for _ in range(count):
        question, context, sql = next(stream)
        yield PROMPT.format(question=question, context=context), _spell(sql, rng.choice(BASE_DIALECTS))


def _gemma3(tokenizer: Any) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**_sizes(tokenizer), query_pre_attn_scalar=32, sliding_window=512, layer_types=layers)
    return Gemma3ForCausalLM(config)


def _qwen3(tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_sizes(tokenizer), tie_word_embeddings=True))


def _sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # vLLM's CPU attention fails at 16
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


_MODELS = {"gemma3": _gemma3, "qwen3": _qwen3}


def _examples(tokenizer: Any) -> list[tuple[list[int], int]]:
    """(token ids, index of the answer's first token) of each row."""
    examples = []
    for prompt, answer in _base_rows(PRETRAINING_ROWS, seed=1):
        begin = f"<bos><start_of_turn>user\n{prompt}<end_of_turn>\n<start_of_turn>model\n"
        examples.append((begin, f"{answer}<end_of_turn>\n"))
    begins = tokenizer([begin for begin, _ in examples], add_special_tokens=False)["input_ids"]
    ends = tokenizer([end for _, end in examples], add_special_tokens=False)["input_ids"]
    return [(begin + end, len(begin)) for begin, end in zip(begins, ends, strict=True)]


def _train(model: Any, examples: list[tuple[list[int], int]]) -> None:
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    )
    order = random.Random(0)
    model.train()
    for _ in range(STEPS):
        inputs, attention, labels = _batch(order.sample(examples, BATCH_SIZE))
        hidden = model.model(input_ids=inputs, attention_mask=attention).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        learnt = targets != -100
        # Compute logits only where a target exists: all logits would cost a third of the time.
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[learnt]), targets[learnt])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def _batch(examples: list[tuple[list[int], int]]) -> tuple[Any, Any, Any]:
    import torch

    length = max(len(ids) for ids, _ in examples)
    inputs = torch.zeros(len(examples), length, dtype=torch.long)
    attention = torch.zeros(len(examples), length, dtype=torch.long)
    labels = torch.full((len(examples), length), -100)
    for row, (ids, begin) in enumerate(examples):
        inputs[row, : len(ids)] = torch.tensor(ids)
        attention[row, : len(ids)] = 1
        labels[row, begin : len(ids)] = torch.tensor(ids[begin:])
    return inputs, attention, labels


def main(argv: list[str]) -> int:
    family: Family = "qwen3" if argv[1:] == ["qwen3"] else "gemma3"
    if not argv or argv[1:] not in ([], [family]):
        print("usage: python -m dropforge_local.tiny DIR [gemma3|qwen3]", file=sys.stderr)
        return 2
    directory, began = Path(argv[0]), time.monotonic()
    print(f"base model: {base_model(directory, family)} ({time.monotonic() - began:.1f} s)")
    print(f"data set: {dataset(directory / 'text-to-sql.jsonl')}")
    print(f"to evaluate on: {dataset(directory / 'text-to-sql-unseen.jsonl', UNSEEN_ROWS, held_out=True)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
