"""Reads command lines with vLLM's own parser: a JSON list of lists on stdin. Runs in build/vllm, without a device.

vLLM looks the parsers of answers up when a server starts: this program does, too.
"""

import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # type: ignore[import-not-found]
from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]
from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]
from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

NAMES = (
    "generation_config",
    "override_generation_config",
    "max_model_len",
    "reasoning_parser",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "load_format",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
)
results = []
for argv in json.load(sys.stdin):
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(parsed)
    if parsed.reasoning_parser:
        ReasoningParserManager.get_reasoning_parser(parsed.reasoning_parser)
    if parsed.tool_call_parser:
        ToolParserManager.get_tool_parser(parsed.tool_call_parser)
    found = {name: getattr(parsed, name, None) for name in NAMES}
    results.append({**found, "lora_modules": repr(parsed.lora_modules)})
json.dump(results, sys.stdout)
