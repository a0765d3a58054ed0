"""FlashInfer's entry points that a module imports or calls, and the arguments that it passes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FlashInferCalls = dict[str, dict[str, set[str]]]
"""Files that pass an argument, by dotted name of the entry point and by argument."""

FLASHINFER = "flashinfer"
NAMED = "(named)"
"""The argument that stands for the entry point itself: the files that import or call it."""


def read_flashinfer_calls(module: ast.Module, file: str, calls: FlashInferCalls) -> None:
    """Add the entry points of a module.

    Arguments are ``name=``, the number of a positional one, ``*`` and ``**``.

    Args:
        module: parsed.
        file: its name.
        calls: is added to.
    """
    names = dict(_imported(module))
    for dotted in names.values():
        if dotted != FLASHINFER:
            calls.setdefault(dotted, {}).setdefault(NAMED, set()).add(file)
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and (dotted := _dotted(node.func, names)):
            for argument in (NAMED, *_arguments(node)):
                calls.setdefault(dotted, {}).setdefault(argument, set()).add(file)


def _imported(module: ast.Module) -> Iterator[tuple[str, str]]:
    """A module's own name of whatever it imports from FlashInfer, and the dotted name."""
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                for one in names:
                    if one.name.partition(".")[0] == FLASHINFER:
                        yield one.asname or FLASHINFER, one.name if one.asname else FLASHINFER
            case ast.ImportFrom(module=str(source), names=names, level=0):
                if source.partition(".")[0] == FLASHINFER:
                    yield from ((one.asname or one.name, f"{source}.{one.name}") for one in names)


def _dotted(function: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of a called function, empty where it is not FlashInfer's."""
    match function:
        case ast.Name(id=name):
            return names.get(name, "")
        case ast.Attribute(value=owner, attr=name) if before := _dotted(owner, names):
            return f"{before}.{name}"
    return ""


def _arguments(call: ast.Call) -> Iterator[str]:
    for position, given in enumerate(call.args):
        yield "*" if isinstance(given, ast.Starred) else str(position)
    for keyword in call.keywords:
        yield f"{keyword.arg}=" if keyword.arg else "**"
