"""Every option of every command line has help, and shows its default where it has one."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

from harness.bench import arms
from harness.core.paths import ROOT

MADE = ("CommandLine(prog", "argparse.ArgumentParser(\n")
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("harness", "ci", "fixtures")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if any(word in path.read_text(encoding="utf-8") for word in MADE)
]
UNSAID = (None, False, "", [], argparse.SUPPRESS)


class Asked(Exception):
    """Carries the parser that a program asked."""


def asked(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of a program, before it reads its command line."""

    def ask(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Asked(parser)

    main = import_module(module).main
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", ask)
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(Asked) as caught:
        main(*[[]] * len(inspect.signature(main).parameters))
    [parser] = caught.value.args
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def with_verbs(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from with_verbs(verb)


def typed(default: object) -> str:
    """As it would be written on a command line."""
    return " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


def unexplained(parser: argparse.ArgumentParser) -> list[str]:
    """Options without help, and those whose default is not in it."""
    shown = " ".join(parser.format_help().split())
    return [
        action.dest
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        and (
            not action.help
            or (
                action.option_strings
                and action.default not in UNSAID
                and f"(default: {typed(action.default)})" not in shown
            )
        )
    ]


def test_the_programs_are_found() -> None:
    known = {"harness.__main__", "harness.server.__main__", "fixtures.bench", "ci.__main__"}
    assert known < set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_option_is_explained(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long paths are broken at hyphens.
    monkeypatch.setenv("COLUMNS", "400")
    parsers = list(with_verbs(asked(module, monkeypatch)))
    assert {parser.prog: unexplained(parser) for parser in parsers} == {
        parser.prog: [] for parser in parsers
    }


def test_what_is_unexplained_is_found() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--silent")
    parser.add_argument("--number", default=3, help="of something")
    parser.add_argument("--flag", action="store_true", help="of nothing")
    parser.add_argument("--names", nargs="+", default=["a", "b"], help="(default: ['a', 'b'])")
    assert unexplained(parser) == ["silent", "number", "names"]


def test_the_grammar_of_an_arm_names_every_key_and_fits_a_terminal() -> None:
    text = arms.grammar()
    keys = {key for known in arms.KINDS.values() for key in known}
    assert keys <= set(text.replace(",", " ").split())
    assert max(map(len, text.splitlines())) <= 80
    for word in arms.EXAMPLE.split()[1::2]:
        assert arms.parse(word).spec == word
