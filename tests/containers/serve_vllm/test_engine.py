"""The serving container's settings, command lines and prompt counting."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import re
import shutil
import socket
import subprocess
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from tests.patience import until

from containers.serve_vllm import vllm_cpu
from containers.serve_vllm.adapters import Loaded, unfit
from containers.serve_vllm.checks import refused_field
from containers.serve_vllm.closing import Closing
from containers.serve_vllm.compiled import Start, tpu_environment
from containers.serve_vllm.engine import (
    CLOSING,
    GREEDY,
    NO_MEDIA,
    NO_PARSERS,
    TOOL_CALL_PARSERS,
    BadSettings,
    Parsers,
    Settings,
    choose,
    choose_parsers,
    has_tpu,
    transformers_argv,
    vllm_argv,
    vllm_cpu_argv,
    vllm_python,
    vllm_tpu_argv,
    vllm_tpu_environment,
    without_sampling,
)
from containers.serve_vllm.prompt import PromptCounter, describe_answers
from containers.serve_vllm.serve import ENGINE_FAILED, find_parsers, serve_behind_gate

from ..conftest import RUNS

ENVIRONMENT = {
    "DROPFORGE_MODEL_URI": "gs://runs/models/demo-0123456789ab",
    "DROPFORGE_SERVED_MODEL_NAME": "demo",
    "DROPFORGE_MAX_MODEL_LEN": "1024",
    "DROPFORGE_MAX_NUM_SEQS": "16",
    "PORT": "8080",
}


def settings() -> Settings:
    return Settings.from_environment(ENVIRONMENT)


def test_the_command_on_a_gpu_streams_the_weights_from_the_bucket() -> None:
    argv = vllm_argv(settings(), "gs://runs/models/demo-0123456789ab/attempt-1/model")
    assert " ".join(argv) == (
        "vllm serve gs://runs/models/demo-0123456789ab/attempt-1/model --served-model-name demo --max-model-len 1024 "
        f"--max-num-seqs 16 {' '.join((*GREEDY, *NO_MEDIA))} --host 0.0.0.0 --port 8080 --load-format runai_streamer"
    )


def test_a_server_that_drains_ends_connections_and_finishes_its_answers() -> None:
    argv = vllm_argv(Settings.from_environment({**ENVIRONMENT, "DROPFORGE_DRAIN_SECONDS": "285"}), "gs://runs/m")
    assert argv[-4:] == ["--shutdown-timeout", "285", "--middleware", CLOSING]
    module, _, name = CLOSING.rpartition(".")
    assert getattr(importlib.import_module(module), name) is Closing, "vLLM imports it by this path"
    assert not {"--shutdown-timeout", "--middleware"} & set(vllm_argv(settings(), "gs://runs/m"))
    with pytest.raises(BadSettings, match="DROPFORGE_DRAIN_SECONDS is '-1'; expected a positive number"):
        Settings.from_environment({**ENVIRONMENT, "DROPFORGE_DRAIN_SECONDS": "-1"})


LOADED = [Loaded(name="sql", directory=Path("/a/sql"), rank=12), Loaded(name="emails", directory=Path("/a/e"), rank=8)]


def test_vllm_loads_every_adapter_at_its_start_and_keeps_it() -> None:
    flags = "--enable-lora --max-lora-rank 16 --max-loras 2 --max-cpu-loras 2 --lora-modules sql=/a/sql emails=/a/e"
    on_gpu, on_cpu = (
        vllm_argv(settings(), "gs://runs/m", loaded=LOADED),
        vllm_cpu_argv("py", settings(), "/m", 9, loaded=LOADED),
    )
    for argv in (on_gpu, on_cpu):
        assert flags in " ".join(argv)
    assert argv[argv.index("emails=/a/e") + 1].startswith("--"), "a name that follows would be another adapter"
    many = [LOADED[0].model_copy(update={"name": f"m-{number}"}) for number in range(20)]
    assert "--max-loras 8 --max-cpu-loras 20 " in " ".join(vllm_argv(settings(), "gs://runs/m", loaded=many))
    assert transformers_argv("/m", 9, LOADED)[-2:] == ["sql=/a/sql", "emails=/a/e"]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": 513}, "r: 513"),
        ({"r": None}, "r: None"),
        ({"use_rslora": True, "init_lora_weights": True, "modules_to_save": None, "use_dora": False}, ""),
    ],
)
def test_an_adapter_that_vllm_refuses_or_computes_otherwise_is_named(config: dict[str, Any], field: str) -> None:
    assert field in unfit({"r": 8, **config}) if field else unfit({"r": 8, **config}) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no list of adapters"),
        ('[{"name": "sql"}]', "is no list of adapters"),
        ('[{"name": "a=b", "run": "r", "digest": "d"}]', "names 'a=b'"),
        ('[{"name": "../x", "run": "r", "digest": "d"}]', "names '../x'"),
        ('[{"name": "demo", "run": "r", "digest": "d"}]', "has a name twice, or that of the base model: demo, demo"),
    ],
)
def test_adapters_that_cannot_be_told_apart_are_wrong_settings(text: str, why: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(why)):
        Settings.from_environment({**ENVIRONMENT, "DROPFORGE_ADAPTERS": text})


def test_a_stream_through_the_middleware_ends_its_connection() -> None:
    """With uvicorn, on which vLLM runs."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for part in (b"a", b"b"):
            await send({"type": "http.response.body", "body": part, "more_body": part == b"a"})

    server = uvicorn.Server(
        uvicorn.Config(Closing(answer), host="127.0.0.1", port=0, lifespan="off", log_level="error")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    client = http.client.HTTPConnection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1], timeout=60)
    client.request("GET", "/")
    got = client.getresponse()
    assert (got.read(), got.getheader("Connection")) == (b"ab", "close")
    assert client.sock is None, "the client saw the end of the connection"
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("model_type", "template", "parsers"),
    [
        ("qwen3", "{{ '<think>' }}", Parsers("qwen3")),
        ("qwen3", "{{ messages }}", Parsers()),  # fine-tuned from a base without the template of thoughts
        ("qwen3_moe", "{{ '<tool_call><function=' }}", Parsers(None, "qwen3_coder")),
        ("llama", "{{ '<tool_call>' }}", Parsers(None, "hermes")),
        ("mistral", "{{ '[TOOL_CALLS]' }}", Parsers(None, "mistral")),
        ("gemma3", "{{ '<tool_call>' }}", Parsers()),
        ("", "", Parsers()),
    ],
)
def test_thoughts_and_calls_are_parsed_where_the_template_has_them(
    model_type: str, template: str, parsers: Parsers
) -> None:
    assert choose_parsers(model_type, template) == parsers
    for argv in (
        vllm_argv(settings(), "gs://runs/m", parsers),
        vllm_tpu_argv(settings(), "/m", parsers),
        vllm_cpu_argv("python", settings(), "/m", 9000, parsers),
    ):
        flags = dict(zip(argv, [*argv[1:], ""], strict=True))
        assert (flags.get("--reasoning-parser"), flags.get("--tool-call-parser")) == parsers
        assert ("--enable-auto-tool-choice" in argv) is (parsers.tool_calls is not None)


TEMPLATES = [
    ("qwen3", "qwen3", Parsers("qwen3", "hermes")),
    ("qwen3_moe", "qwen3_instruct_2507", Parsers(None, "hermes")),
    ("qwen2", "qwen2_5", Parsers(None, "hermes")),
    ("llama", "llama3", Parsers()),
    ("llama", "llama3_1", Parsers(None, "llama3_json")),
    ("llama", "llama3_2", Parsers(None, "llama3_json")),
    ("gemma3", "gemma3", Parsers()),
    ("gemma", "gemma", Parsers()),
]


@pytest.mark.parametrize(("model_type", "name", "parsers"), TEMPLATES, ids=[name for _, name, _ in TEMPLATES])
def test_the_parsers_of_a_family_follow_its_own_template(model_type: str, name: str, parsers: Parsers) -> None:
    """TRL has copies of the templates."""
    trl = importlib.util.find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    template = Path(trl.origin).with_name("chat_templates") / f"{name}.jinja"
    assert choose_parsers(model_type, template.read_text()) == parsers


def test_the_parsers_are_read_from_the_committed_files(cloud: Any) -> None:
    prefix = f"models/{uuid.uuid4().hex}/attempt-1/model"
    for name, text in (("config.json", '{"model_type": "qwen3"}'), ("chat_template.jinja", "<think> <tool_call>")):
        cloud.put(RUNS, f"{prefix}/{name}", text)
    assert find_parsers(cloud.client, f"gs://{RUNS}/{prefix}") == ("qwen3", "hermes")
    assert find_parsers(cloud.client, f"gs://{RUNS}/models/without/files") == (None, None)


def test_several_gpus_hold_one_model_together() -> None:
    several = Settings.from_environment({**ENVIRONMENT, "DROPFORGE_TENSOR_PARALLEL_SIZE": "4"})
    argv = vllm_argv(several, "gs://runs/m")
    assert argv[argv.index("--tensor-parallel-size") + 1] == "4"
    assert argv[argv.index("--model-loader-extra-config") + 1] == '{"distributed": true}'
    with pytest.raises(BadSettings, match="TENSOR_PARALLEL_SIZE is '0'"):
        Settings.from_environment({**ENVIRONMENT, "DROPFORGE_TENSOR_PARALLEL_SIZE": "0"})


def test_the_command_on_a_tpu_reads_files_on_all_chips_and_keeps_what_it_compiles() -> None:
    chips = Settings.from_environment(
        {**ENVIRONMENT, "DROPFORGE_TENSOR_PARALLEL_SIZE": "8", "DROPFORGE_WORK_DIRECTORY": "/work"}
    )
    assert chips.work == Path("/work")
    assert " ".join(vllm_tpu_argv(chips, "/work/model")) == (
        "vllm serve /work/model --served-model-name demo --max-model-len 1024 --max-num-seqs 16 "
        f"--tensor-parallel-size 8 {' '.join((*GREEDY, *NO_MEDIA))} --host 0.0.0.0 --port 8080"
    )
    assert vllm_tpu_environment(chips.work) == {"HF_HUB_OFFLINE": "1", "HF_HOME": "/work/hf"}
    assert tpu_environment(Path("/work/compiled")) == {"VLLM_XLA_CACHE_PATH": "/work/compiled/xla"}


@pytest.mark.parametrize(
    ("device", "expected"), [("accel0", True), ("vfio/0", True), ("vfio/vfio", False), ("sda", False)]
)
def test_chips_are_devices(tmp_path: Path, device: str, expected: bool) -> None:
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    assert has_tpu(tmp_path) is expected


def test_the_command_on_a_cpu_does_not_use_what_its_build_lacks() -> None:
    argv = vllm_cpu_argv("/opt/vllm/bin/python", settings(), "/tmp/model", 9000)
    assert argv[:3] == ["/opt/vllm/bin/python", "-P", str(Path(vllm_cpu.__file__))]
    assert vllm_cpu.SERVER == "vllm.entrypoints.openai.api_server"  # not `vllm serve`
    assert {"--enforce-eager", "float32", "127.0.0.1", "9000"} <= set(argv)


def test_transformers_serves_one_model_on_loopback() -> None:
    argv = transformers_argv("/tmp/model", 9000)
    assert argv[1:] == ["-m", "containers.serve_vllm.standin", "/tmp/model", "9000"]


def test_requests_get_the_answers_of_the_evaluation_unless_the_spec_asks_for_the_base_model_s() -> None:
    sampled = Settings.from_environment({**ENVIRONMENT, "DROPFORGE_SAMPLING": "base_model"})
    for argv in (vllm_argv, vllm_tpu_argv, lambda settings, model: vllm_cpu_argv("python", settings, model, 9000)):
        greedy, base = argv(settings(), "/m"), argv(sampled, "/m")
        assert json.loads(greedy[greedy.index("--override-generation-config") + 1]) == {"temperature": 0}
        assert greedy[greedy.index("--generation-config") + 1] == "vllm"
        assert base[base.index("--generation-config") + 1] == "auto"
        assert "--override-generation-config" not in base
    with pytest.raises(BadSettings, match="DROPFORGE_SAMPLING is 'hot'; expected one of greedy, base_model"):
        Settings.from_environment({**ENVIRONMENT, "DROPFORGE_SAMPLING": "hot"})
    kept = {"eos_token_id": [1, 106], "pad_token_id": 0, "max_new_tokens": 7}
    assert without_sampling({**kept, "do_sample": True, "temperature": 0.6, "top_k": 64, "top_p": 0.95}) == kept


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True, "top_logprobs": 5}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"echo": True}, "echo"),
        ({"n": 1, "logprobs": None, "tools": [], "temperature": 0.5, "stop": ["x"], "user": "me"}, ""),
    ],
)
def test_the_stand_in_refuses_what_its_engine_ignores(body: dict[str, Any], field: str) -> None:
    assert refused_field({"model": "demo", **body}) == field


@pytest.mark.parametrize(
    ("wanted", "devices", "vllm", "engine"),
    [
        ("auto", {"gpu"}, True, "vllm"),
        ("auto", {"tpu"}, True, "vllm-tpu"),
        ("auto", {"tpu"}, False, "transformers"),
        ("auto", {}, True, "vllm-cpu"),
        ("auto", {}, False, "transformers"),
        ("vllm", {}, True, "vllm-cpu"),
        ("vllm", {"gpu"}, True, "vllm"),
        ("transformers", {"gpu", "tpu"}, True, "transformers"),
    ],
)
def test_the_engine_follows_the_machine_unless_told(wanted: str, devices: set[str], vllm: bool, engine: str) -> None:
    assert choose(wanted, gpu="gpu" in devices, tpu="tpu" in devices, vllm=vllm) == engine


def test_an_engine_that_is_not_installed_is_refused() -> None:
    with pytest.raises(BadSettings, match="DROPFORGE_ENGINE is 'vllm', and the program vllm is not on the PATH"):
        choose("vllm", gpu=False, tpu=False, vllm=False)


def test_the_interpreter_of_vllm_is_beside_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vllm_python() is None
    (tmp_path / "vllm").touch(mode=0o755)
    assert vllm_python() == str(tmp_path / "python")


def test_every_wrong_setting_is_named() -> None:
    wrong = {"DROPFORGE_MODEL_URI": "gs://runs/elsewhere", "PORT": "eighty", "DROPFORGE_ENGINE": "llama"}
    with pytest.raises(BadSettings) as caught:
        Settings.from_environment(wrong)
    for part in ("'gs://runs/elsewhere'; expected gs://", "SERVED_MODEL_NAME is not set", "'eighty'", "'llama'"):
        assert part in str(caught.value)


def test_prompts_are_counted_as_the_engine_counts_them(base_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base_model)
    counter = PromptCounter(base_model)
    messages = [
        {"role": "user", "content": "Question: how many\nContext: CREATE TABLE cars (price INT)"},
        {"role": "assistant", "content": "select 17"},
        {"role": "user", "content": "and 42 more?"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert counter.count({"messages": messages}) == len(expected)
    assert counter.count({"prompt": "select 17"}) == len(tokenizer("select 17")["input_ids"])


@pytest.mark.parametrize("fault", ["port", "tokenizer"])
def test_a_start_that_fails_is_told_and_leaves_no_engine(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    shutil.copytree(base_model, tmp_path / "model")
    if fault == "tokenizer":
        (tmp_path / "model" / "tokenizer.json").unlink()
    before = psutil.Process().children()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if fault == "port" else 0
        here = replace(settings(), host="127.0.0.1", port=port)
        code = asyncio.run(serve_behind_gate(here, "transformers", tmp_path, NO_PARSERS, [], Start(0.0)))
    assert code == ENGINE_FAILED
    assert "the endpoint failed: " in capsys.readouterr().err
    assert psutil.Process().children() == before


@pytest.mark.parametrize("body", [{"prompt": ["a", "b"]}, {}, {"messages": "hello"}, {"messages": [{"role": "user"}]}])
def test_what_is_no_prompt_is_refused(base_model: Path, body: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        PromptCounter(base_model).count(body)


def test_a_qwen_with_turns_of_its_own_answers_without_the_prompt(base_model: Path, tmp_path: Path) -> None:
    """`transformers serve` parses answers by the template in the tokenizer."""
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base_model / name, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    describe_answers(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer("select 1<end_of_turn>", add_special_tokens=False)["input_ids"]
    assert tokenizer.parse_response(ids, prefix=prompt)["content"] == "select 1"

    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    shutil.copy(base_model / "tokenizer_config.json", tmp_path)
    describe_answers(tmp_path)
    assert "response_template" not in (tmp_path / "tokenizer_config.json").read_text()


@pytest.mark.slow
def test_vllm_s_own_parser_reads_every_flag(vllm_environment: Path) -> None:
    """The parser of the CPU build (`make vllm`); the images have other versions of vLLM, for GPUs and TPUs."""
    several = {**ENVIRONMENT, "DROPFORGE_TENSOR_PARALLEL_SIZE": "2"}
    chosen = [Settings.from_environment({**several, "DROPFORGE_SAMPLING": name}) for name in ("greedy", "base_model")]
    known = {parser: Parsers("qwen3", parser) for _, _, parser in TOOL_CALL_PARSERS}
    lines = [
        line
        for each in chosen
        for line in (
            vllm_argv(each, "gs://runs/m", known["hermes"], LOADED)[2:],  # after `vllm serve`
            vllm_tpu_argv(each, "/m", known["hermes"])[2:],
            vllm_cpu_argv("python", each, "/m", 9000, known["hermes"], LOADED)[3:],  # after `python -P vllm_cpu.py`
        )
    ]
    lines += [vllm_tpu_argv(chosen[0], "/m", each)[2:] for each in known.values()]
    script = Path(__file__).with_name("parse_flags.py")
    done = subprocess.run(
        [vllm_environment / "bin" / "python", script],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    parsed = json.loads(done.stdout)
    parsed, others = parsed[:6], parsed[6:]
    assert [each["tool_call_parser"] for each in others] == list(known)
    assert {each["enable_auto_tool_choice"] for each in [*parsed, *others]} == {True}
    assert [each["generation_config"] for each in parsed] == ["vllm"] * 3 + ["auto"] * 3
    assert [each["override_generation_config"] for each in parsed] == [{"temperature": 0.0}] * 3 + [{}] * 3
    served = ["LoRAModulePath(name='sql'", "LoRAModulePath(name='emails'"]
    loading = [each for at, each in enumerate(parsed) if at % 3 != 1]  # not on TPUs
    assert {(each["enable_lora"], each["max_lora_rank"], each["max_loras"]) for each in loading} == {(True, 16, 2)}
    assert all(start in each["lora_modules"] for each in loading for start in served)
    assert {(each["max_model_len"], each["reasoning_parser"]) for each in parsed} == {(1024, "qwen3")}
    assert [each["load_format"] for each in parsed] == ["runai_streamer", "auto", "auto"] * 2
