"""Signatures of a checkout of FlashInfer, which calls of sglang's backends are held to."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Any

from harness.errors import KernelRefusal
from harness.sglang.stubs import ABSENT, STUBS

PACKAGE = "flashinfer"
_calling: list[str] = []


def hold_to(folder: Path) -> None:
    """Refuse, from now on, every call that a checkout of FlashInfer would not take.

    Its kernels stay the strict reference's; a name that it lacks cannot be imported. What a caller
    leaves out becomes the checkout's default where that is a literal and the reference knows the
    parameter.

    Args:
        folder: holds ``flashinfer/``; read, never imported.
    """
    served = STUBS[PACKAGE].served
    for name, stand_in in list(served.items()):
        served[name] = _held(stand_in, name, folder)


def _held(stand_in: Any, name: str, folder: Path) -> Any:
    entry = f"{PACKAGE}.{name}"
    found = definition(folder, entry)
    if found is None:
        return ABSENT
    if isinstance(stand_in, type):
        methods = {
            method: _bound(function, signature, f"{entry}.{method}")
            for method, function in inspect.getmembers(stand_in, inspect.isfunction)
            if (signature := _method(found, method)) is not None
        }
        return type(stand_in.__name__, (stand_in,), methods)
    if not isinstance(found, ast.FunctionDef):
        return stand_in
    return _bound(stand_in, signature_of(found.args), entry)


def _bound(function: Callable[..., Any], signature: inspect.Signature, entry: str) -> Any:
    own = inspect.signature(function).parameters

    @wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        if _calling:  # a stand-in's own way from one of its methods to another
            return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise KernelRefusal(f"{entry}: {error}") from error
        defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if name not in given and name in own and parameter.default not in UNSTATED
        }
        _calling.append(entry)
        try:
            return function(*args, **kwargs, **defaults)
        finally:
            _calling.pop()

    return held


UNKNOWN = object()
"""A default that is no literal."""
NONE = Parameter.empty
UNSTATED = (UNKNOWN, NONE, None)
"""Where the checkout works a value out, as the stand-in's own default does."""


def signature_of(args: ast.arguments) -> inspect.Signature:
    """The signature of a parsed function; defaults that are no literals are ``UNKNOWN``."""
    positional = [*args.posonlyargs, *args.args]
    given = [NONE] * (len(positional) - len(args.defaults)) + [_literal(d) for d in args.defaults]
    parameters = [
        Parameter(arg.arg, Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for arg, default in zip(positional, given, strict=True)
    ]
    if args.vararg is not None:
        parameters.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=NONE if d is None else _literal(d))
        for arg, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg is not None:
        parameters.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def definition(folder: Path, dotted: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The last definition of a dotted name, through re-exports; earlier ones are overloads."""
    module, _, name = dotted.rpartition(".")
    path = folder.joinpath(*module.split("."))
    is_package = path.is_dir()
    file = path / "__init__.py" if is_package else path.with_suffix(".py")
    if not file.is_file():
        return None
    found: ast.FunctionDef | ast.ClassDef | None = None
    for node in _of_module(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined) if defined == name:
                found = node
            case ast.ImportFrom(module=source, names=names, level=level) if level:
                for one in names:
                    if found is None and (one.asname or one.name) in (name, "*"):
                        above = module.split(".")[: None if is_package else -1]
                        above = above[: len(above) - level + 1]
                        original = name if one.name == "*" else one.name
                        found = definition(folder, _join([*above, source or "", original]))
    return found


def _of_module(node: ast.AST) -> Iterator[ast.AST]:
    """What a module defines and imports itself, under conditions too, in its order.

    A method, or a function inside another one, may have the name of an entry point.
    """
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _of_module(child)


def _join(parts: Sequence[str]) -> str:
    return ".".join(part for part in parts if part)


def _method(owner: ast.AST, name: str) -> inspect.Signature | None:
    """The signature of a class's method, through ``alias = method``; None if it has none."""
    if not isinstance(owner, ast.ClassDef):
        return None
    functions = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}
    for node in owner.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=original)):
                if alias == name and original in functions:
                    return signature_of(functions[original].args)
    return signature_of(functions[name].args) if name in functions else None
