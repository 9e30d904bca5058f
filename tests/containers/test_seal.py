"""The parity seal: good exports of the four families pass, and each fault on the way to an endpoint is caught.

The endpoint is a model in this process, asked by the code of stage deploy (dropforge/stages/parity.py) in vLLM's
format; the stand-in engine's own function gives the log-probabilities. tests/containers/serve_vllm asks real engines.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from containers.common.chat import MINIMAL_TEMPLATE, load_tokenizer, render
from containers.common.evaluation import generate_ids
from containers.common.sealing import make_seal, with_other_kernel
from containers.train_trl import export
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.run.record import Parity
from dropforge.run.seal import Seal
from dropforge.spec import JobSpec, parse_spec
from dropforge.stages.parity import Endpoint, progress

from . import same_class, trained
from .conftest import job_spec
from .lazy import Lazy

merge, standin = Lazy("containers.train_trl.merge"), Lazy("containers.serve_vllm.standin")

# PEFT uses a name that transformers will remove; the trainer ignores such warnings, too.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
ROWS = 8  # a seal has up to 32; fewer take less time
FAMILIES: tuple[same_class.Family, ...] = ("gemma3", "gemma1", "qwen3", "llama31")


def spec() -> JobSpec:
    return parse_spec(json.dumps(job_spec(serve={"type": "cloud_run", "ttl": "1h"})).encode())


@dataclass
class Served:
    """An endpoint: a model, and what its engine makes of messages and of requests without a temperature."""

    model: Any
    tokenizer: Any
    add_special_tokens: bool = False
    samples: bool = False
    loses_newline: bool = False
    reads: int = 0  # how many tokens, from the end of a prompt, the answer is computed from; 0: all of them
    requests: list[str] = field(default_factory=list)

    def post(self, url: str, json: dict[str, Any], timeout: float) -> Any:
        self.requests.append(url)
        content = self._chat(json) if "messages" in json else self._complete(json)
        return SimpleNamespace(status_code=200, json=lambda: content)

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        text = render(self.tokenizer, body["messages"], for_answer=True)
        if self.loses_newline:
            text = "".join(text.rpartition("\n")[::2])
        ids = list(self.tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"])
        answer = self._answer(ids[-self.reads :], body)
        return {"prompt_token_ids": ids, "choices": [{"token_ids": answer}]}

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        choice = {"prompt_token_ids": body["prompt"], "token_ids": self._answer(body["prompt"][-self.reads :], body)}
        if body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = standin.prompt_logprobs(self.model, body["prompt"], body["prompt_logprobs"])
        return {"choices": [choice]}

    def _answer(self, ids: list[int], body: dict[str, Any]) -> list[int]:
        import torch

        if self.samples and "temperature" not in body:
            given = torch.tensor([ids])
            output = self.model.generate(
                input_ids=given, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=body["max_tokens"]
            )
            return [int(token) for token in output[0, len(ids) :]]
        return generate_ids(self.model, self.tokenizer, [ids], body["max_tokens"])[0]


@dataclass
class Export:
    """An exported model of a family, and its seal."""

    directory: Path
    base: Path
    checkpoint: Path
    seal: Seal

    def model(self, **options: Any) -> Any:
        return load(self.directory, **options)

    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.directory), trust_remote_code=False)


def load(directory: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, **{"dtype": "auto", **options}).eval()


def merged(base: Path, checkpoint: Path, directory: Path, scale: float = 1.0) -> Path:
    """The exported model, with the adapter's scale times `scale`."""
    changed = directory / "checkpoint"
    shutil.copytree(checkpoint, changed)
    config = json.loads((changed / merge.ADAPTER_CONFIG).read_text())
    (changed / merge.ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * scale}))
    export.save(base, changed, load_tokenizer(str(base), trust_remote_code=False), directory / "export", spec())
    return directory / "export" / "model"


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    base, checkpoint = trained.make(request.param)
    directory = merged(base, checkpoint, tmp_path_factory.mktemp(request.param))
    tokenizer = load_tokenizer(str(directory), trust_remote_code=False)
    seal = make_seal(load(directory), tokenizer, trained.held_out()[:ROWS], spec(), {"saved_to_reloaded": 0.0})
    assert seal is not None
    return Export(directory, base, checkpoint, Seal.model_validate_json(seal.model_dump_json()))


def result(exported: Export, served: Served) -> Parity:
    """The verdict of stage deploy. Raises CloudError."""
    *_, last = progress(Parity(state="checking"), exported.seal, Endpoint(served, "http://endpoint", "demo"))
    return last


def cause(exported: Export, served: Served) -> str:
    """Why stage deploy refuses the endpoint."""
    with pytest.raises(CloudError) as caught:
        result(exported, served)
    assert caught.value.error_class is ErrorClass.PARITY
    assert not re.search("SELECT|amount|How many", caught.value.message), "a message repeats training text"
    return caught.value.message.rpartition("likely cause: ")[2]


def test_good_endpoints_are_sealed(exported: Export) -> None:
    """The same precision, another precision, another kernel, and the adapter beside its base."""
    import torch

    tokenizer = exported.tokenizer()
    beside = export.trained_model(exported.base, exported.checkpoint, None, spec())
    for model in (
        exported.model(),
        exported.model(dtype=torch.float32),
        exported.model(attn_implementation="eager"),
        beside,
    ):
        served = Served(model, tokenizer)
        parity = result(exported, served)
        assert (parity.state, parity.rows) == ("sealed", ROWS)
        assert parity.divergence < exported.seal.limit / 2, "the margin to a fault is lost"
        assert len(served.requests) == 2 * ROWS
    assert exported.seal.noise.divergence > 0


def test_the_noise_rounds_the_weights_and_not_the_rotary_frequencies(exported: Export) -> None:
    """As in a server that loads a model of 32 bits in 16 bits."""
    import torch

    model = exported.model(dtype=torch.float32)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    row = exported.seal.rows[0]
    with_other_kernel(model, [(row.prompt, row.answer)])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert any("inv_freq" in name for name in before)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def scaled(exported: Export, tmp_path: Path) -> Any:
    return load(merged(exported.base, exported.checkpoint, tmp_path, 0.9))


WEIGHTS: dict[str, tuple[Callable[[Export, Path], Any], str]] = {
    "scale x 0.9": (scaled, "scale"),
    "int4": (lambda exported, _: trained.int4(exported.model()), "quantisation"),
    "unmerged adapter": (lambda exported, _: load(exported.base), "adapter"),
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_wrong_weights_are_refused(exported: Export, fault: str, tmp_path: Path) -> None:
    make, word = WEIGHTS[fault]
    assert word in cause(exported, Served(make(exported, tmp_path), exported.tokenizer()))


def test_another_template_is_refused(exported: Export) -> None:
    tokenizer = exported.tokenizer()
    template = tokenizer.chat_template
    other = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    tokenizer.chat_template = other if template == MINIMAL_TEMPLATE else MINIMAL_TEMPLATE
    assert "template" in cause(exported, Served(exported.model(), tokenizer))


def test_a_lost_newline_of_the_template_is_refused(exported: Export) -> None:
    assert "template" in cause(exported, Served(exported.model(), exported.tokenizer(), loses_newline=True))


def test_a_prompt_with_its_first_token_lost_or_twice_is_refused(exported: Export) -> None:
    tokenizer = exported.tokenizer()
    if exported.seal.rows[0].prompt[0] != tokenizer.bos_token_id:
        pytest.skip("a prompt of this family has no first token of its own")
    lost = exported.tokenizer()
    lost.bos_token = None
    lost.chat_template = lost.chat_template.replace("{{- bos_token }}", "").replace("{{ bos_token }}", "")
    assert cause(exported, Served(exported.model(), lost)).startswith("bos: the endpoint's prompt lacks")
    twice = exported.tokenizer()
    twice.chat_template = "{{ bos_token }}" + twice.chat_template
    assert "twice" in cause(exported, Served(exported.model(), twice))


def test_sampling_defaults_of_the_base_are_refused(exported: Export) -> None:
    import torch

    torch.manual_seed(0)
    tokenizer = exported.tokenizer()
    assert "generation config" in cause(exported, Served(exported.model(), tokenizer, samples=True))


def test_an_answer_from_another_prompt_is_refused(exported: Export) -> None:
    """A stale prefix cache: the ids and the log-probabilities of the prompt are right.

    The endpoint computes its answers from the end of the template, so all rows get the same answer.
    """
    assert len({tuple(row.answer) for row in exported.seal.rows}) > 1
    served = Served(exported.model(), exported.tokenizer(), reads=3)
    assert "prefix cache" in cause(exported, served)


def test_a_seal_is_small_and_has_the_held_out_rows(exported: Export) -> None:
    assert [row.row for row in exported.seal.rows] == list(range(1, ROWS + 1))
    assert len(exported.seal.model_dump_json()) < 10_000 * ROWS
    ends = {row.answer[-1] for row in exported.seal.rows}
    assert ends <= set(exported.model().generation_config.eos_token_id)
    assert (exported.seal.greedy, exported.seal.dtype) == (True, "bfloat16")
