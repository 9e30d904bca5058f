"""The syntax of a chat template in a spec. Nothing here renders it: the containers do, in transformers' sandbox."""

from __future__ import annotations

from typing import Any

# What the sandbox of transformers refuses when a template is rendered.
_FILES = "a chat template cannot read other templates"
_PRIVATE = "names that begin with _ are closed to templates"


def problem_of(text: str) -> str:
    """What is wrong with the text of a chat template; "" if nothing is."""
    from jinja2 import TemplateSyntaxError, nodes

    if "{{" not in text and "{%" not in text:
        return "no Jinja; expected the text of a template, not the name of one or the path of a file"
    try:
        tree = _environment().parse(text)
        files = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
        for node in tree.find_all((*files, nodes.Getattr, nodes.Getitem)):
            if isinstance(node, files):
                return f"line {node.lineno}: {_FILES}"
            if _attribute(node).startswith("_"):
                return f"line {node.lineno}: {_PRIVATE}"
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except RecursionError:
        return "too many expressions within each other"
    return ""


def _attribute(node: Any) -> str:
    """The name that `a.name` or `a['name']` asks for; "" for a computed one, which the sandbox checks."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr
    return str(node.arg.value) if isinstance(node.arg, nodes.Const) else ""


def _environment() -> Any:
    """Knows the tags of transformers (utils/chat_template_utils.py): loop controls, and {% generation %}."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Environment(extensions=["jinja2.ext.loopcontrols", Generation])
