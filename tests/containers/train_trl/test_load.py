"""The precision of QLoRA on a CPU. Products of 16 bits take 14 times as long without instructions for them."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from containers.common.token_rows import TokenRows
from containers.train_trl.methods import load_method
from containers.train_trl.plan import Device, make_plan, shape_of
from containers.train_trl.train import Inputs, load_base
from dropforge.spec import parse_spec

from .. import forked, same_class
from ..conftest import ROOT, job_spec
from ..lazy import Lazy

bitsandbytes, torch, transformers = Lazy("bitsandbytes"), Lazy("torch"), Lazy("transformers")
trainer = Lazy("containers.train_trl.trainer")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL
def test_a_cpu_computes_qlora_in_the_precision_of_its_plan(tmp_path: Path) -> None:
    base = same_class.make(ROOT / "build" / "same_class", "gemma3")
    spec = parse_spec(json.dumps(job_spec(training={"adapter": {"type": "qlora"}})).encode())
    plan = make_plan(spec, shape_of(str(base), False), Device("cpu", "cpu", 2**34, bf16=False), [50])
    unused = cast(Any, None)
    inputs = Inputs(base=str(base), base_source=unused, tokenizer=unused, examples=unused, plan=plan, limit=unused)
    model = load_base(inputs, spec, None)
    layers = [layer for layer in model.modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)]
    assert layers
    assert {layer.compute_dtype for layer in layers} == {torch.float32}

    rows = TokenRows.of([[1, 2, 3]] * 4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    columns = {"input_ids": rows, "labels": rows}
    built = load_method("sft").build_trainer(model, spec, columns, tokenizer, plan, tmp_path)
    assert trained_types(built.model) == {torch.bfloat16}  # so TRL has them
    trainer.keep_precision(built.model, plan)
    assert trained_types(built.model) == {torch.float32}


def test_training_imports_no_compiler(cloud: Any) -> None:
    """The imports take 2 s of processor time, and nothing compiles.

    The process that forks containers (forked.py) has imported what a training imports, after `quiet_libraries`.
    """
    forked.prepare({name: value for name, value in cloud.environment().items() if name != "TORCHDYNAMO_DISABLE"})
    reading, writing = forked.CONTEXT.Pipe(duplex=False)
    process = forked.CONTEXT.Process(target=send_modules, args=(writing,))
    process.start()
    writing.close()
    imported = reading.recv()
    process.join()
    assert {"bitsandbytes", "peft", "trl.trainer.sft_trainer"} <= imported
    assert {"torch._inductor.compile_fx", "functorch.compile"} & imported == set()


def send_modules(sender: Connection) -> None:
    import_module(forked.IMPORTED)  # the tests of the emulators may have started the process, without these modules
    sender.send(set(sys.modules))


def trained_types(model: Any) -> set[Any]:
    return {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL
def test_a_layer_in_4_bits_passes_gradients_after_an_evaluation() -> None:
    """It can fail on a CPU with AVX512-BF16 only, where bitsandbytes packs the weights of other layers."""
    layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    trainer.keep_gradients(layer)
    rows = torch.ones(2, 64)
    with torch.no_grad():
        layer.eval()(rows)
    asked = rows.clone().requires_grad_()
    layer.train()(asked).sum().backward()
    assert asked.grad is not None
