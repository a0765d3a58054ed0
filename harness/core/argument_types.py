"""Argument parsing shared by every command line: help, argument types, one-line refusals."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from harness.errors import UsageError, rejected

MOST_PORT = 65535


class HelpFormatter(argparse.HelpFormatter):
    """Adds an option's default to its help, and keeps paragraphs and indented lines."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, "", argparse.SUPPRESS)
        if action.help and shown and "%(default)" not in action.help:
            many = isinstance(action.default, (list, tuple))
            default = " ".join(map(str, action.default)) if many else "%(default)s"
            return f"{action.help} (default: {default})" if default else action.help
        return action.help

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.replace("``", "").strip("\n").split("\n\n")
        return "\n\n".join(p if p.startswith(" ") else fill(p, width, indent) for p in paragraphs)


class CommandLine(argparse.ArgumentParser):
    """A parser whose help shows defaults, and which refuses in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line; ``--help`` shows the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def count(text: str) -> int:
    """A whole number, 1 or more.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not accepted; accepted: 1 or more")
    return int(text)


def above_zero(text: str) -> float:
    """A number above zero; infinity is one.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0.0:
        raise ArgumentTypeError(f"{text!r} is not accepted; accepted: a number above 0")
    return value


def port(text: str) -> int:
    """A TCP port, 0 for any that is free.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) > MOST_PORT:
        raise ArgumentTypeError(f"{text!r} is not accepted; accepted: 0 to {MOST_PORT}")
    return int(text)


def is_http_url(text: str) -> bool:
    """Whether it names a server: a scheme that HTTP has, a host, and a port if it names one."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def check_writable(path: Path, field: str) -> None:
    """Know before the work that its result can be written; leaves no new file.

    Raises:
        UsageError: it cannot.
    """
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        accepted = f"a file that can be written ({error.strerror})"
        raise UsageError(rejected(field, str(path), accepted)) from error
    if is_new:
        path.unlink()
