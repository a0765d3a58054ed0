"""Numbers of command lines: one wording for those that make no sense."""

from __future__ import annotations

from argparse import ArgumentTypeError


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
