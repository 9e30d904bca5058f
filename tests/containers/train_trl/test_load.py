"""The loaded base model."""

from __future__ import annotations

import json
from typing import Any, cast

from containers.train_trl.plan import Device, make_plan, shape_of
from containers.train_trl.train import Inputs, load_base
from dropforge.spec import parse_spec

from .. import same_class
from ..conftest import ROOT, job_spec
from ..lazy import Lazy

bitsandbytes, torch = Lazy("bitsandbytes"), Lazy("torch")


def test_a_cpu_multiplies_4_bit_weights_in_the_precision_of_its_plan() -> None:
    """A product of 16 bits takes 14 times as long on a CPU without instructions for them: measurements.md."""
    base = same_class.make(ROOT / "build" / "same_class", "gemma3")
    spec = parse_spec(json.dumps(job_spec(training={"adapter": {"type": "qlora"}})).encode())
    plan = make_plan(spec, shape_of(str(base), False), Device("cpu", "cpu", 2**34, bf16=False), [50])
    unused = cast(Any, None)
    inputs = Inputs(base=str(base), base_source=unused, tokenizer=unused, examples=unused, plan=plan)
    model = load_base(inputs, spec, None)
    layers = [layer for layer in model.modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)]
    assert layers
    assert {layer.compute_dtype for layer in layers} == {torch.float32}
