"""Prints what a version of vLLM has: flags, parsers of answers, and routes with all optional ones. Runs in its Python.

tests/data/vllm.json has the output for each version that an image or a test has (test_versions.py).
"""

import json
import os

os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

from vllm.entrypoints.launchers.app import build_app  # type: ignore[import-not-found]
from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found]
from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]
from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]
from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]
from vllm.version import __version__  # type: ignore[import-not-found]

parser = make_arg_parser(FlexibleArgumentParser())
app = build_app(parser.parse_args([]), ("generate",))
facts = {
    "flags": {name for action in parser._actions for name in action.option_strings if name.startswith("--")},
    "reasoning_parsers": ReasoningParserManager.list_registered(),
    "routes": {route.path for route in app.routes},
    "tool_parsers": ToolParserManager.list_registered(),
}
print(json.dumps({__version__: {name: sorted(found) for name, found in facts.items()}}))
