"""The sets of extras that tox.ini and the documents name, each in an environment of its own."""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

Extras = frozenset[str]
IN_DOCUMENT = re.compile(r"\.\[([\w,-]+)\]")
IN_TOX = re.compile(r"\{env:SPECGATE_STACK:(\w+)\}")
STACKS = ("gpu",)
"""What SPECGATE_STACK may be besides its default."""
LACKING = re.compile(
    r"(?:could not import|No module named) ['\"]?([\w.]+)|([\w.-]+) is not installed"
)


def of_tox(text: str) -> set[Extras]:
    """Every set of extras that an environment of tox.ini is made of."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read_string(text)
    found = set()
    for name in tox.sections():
        section = tox[name]
        if not name.startswith("testenv") or section.get("package") == "skip":
            continue
        words = re.split(r"[,\s]+", section.get("extras", tox["testenv"]["extras"]).strip())
        for stack in (r"\1", *STACKS):
            found.add(frozenset(IN_TOX.sub(stack, word) for word in words))
    return found


def of_documents(texts: Iterable[str]) -> set[Extras]:
    """Every set of extras that a document tells a person to install."""
    names = (match[1] for text in texts for match in IN_DOCUMENT.finditer(text))
    return {frozenset(name.split(",")) for name in names}


def requirement(extras: Extras) -> str:
    """Such as ".[lint,test]"."""
    return f".[{','.join(sorted(extras))}]"


def lacking(report: Path, accepted: Iterable[str]) -> list[str]:
    """Reasons of tests that were skipped for want of a package, but for the accepted packages.

    Args:
        report: JUnit's XML.
        accepted: packages that a set may lack.
    """
    skipped = (node.get("message", "") for node in Xml.parse(report).getroot().iter("skipped"))
    reasons = {
        reason: (match[1] or match[2]).lower()
        for reason in skipped
        if (match := LACKING.search(reason))
    }
    return [reason for reason, name in reasons.items() if name not in set(accepted)]


def one_of_each_folder(listed: str) -> list[str]:
    """The first test of each folder of suites/.

    Args:
        listed: what ``pytest --collect-only -q`` printed.
    """
    first: dict[str, str] = {}
    for line in listed.splitlines():
        if line.startswith("suites/") and "::" in line:
            first.setdefault(line.split("/")[1], line)
    return [*first.values()]


def kernel_packages(project: Mapping[str, Any], gpu: Extras) -> set[str]:
    """Packages that an environment without a GPU may lack: the GPU extras', and sglang itself.

    What every environment has is none of them, though such an extra bounds its version.

    Args:
        project: ``[project]`` of pyproject.toml.
        gpu: the extras that need a GPU.
    """
    of_gpu = [line for extra in gpu for line in project["optional-dependencies"][extra]]
    return {"sglang", *_names(of_gpu)} - _names(project["dependencies"])


def _names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w.-]", line)[0].lower() for line in requirements}
