"""Reads command lines with vLLM's own parser: a JSON list of lists on stdin. Runs in build/vllm, without a device."""

import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # type: ignore[import-not-found]
from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

NAMES = ("generation_config", "override_generation_config", "max_model_len", "reasoning_parser", "load_format")
results = []
for argv in json.load(sys.stdin):
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(parsed)
    results.append({name: getattr(parsed, name, None) for name in NAMES})
json.dump(results, sys.stdout)
