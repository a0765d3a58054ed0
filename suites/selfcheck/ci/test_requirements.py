"""Every package that a module imports is one that the project, or its extra test, asks for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

from ci.nightly.checks import requirements
from fixtures.mutation.planting import statements
from harness.core.paths import ROOT

pytestmark = pytest.mark.untraced
FOLDERS = ("ci", "fixtures", "harness", "suites")
# Imported by the modules that are loaded where it is, alone.
OPTIONAL = {
    "sglang": ("harness/plugin",),
    "cosmic_ray": ("fixtures/mutation",),
    "ray": ("ci/cluster", "fixtures/clusters", "suites/cluster"),
}

installed = cache(packages_distributions)


def imported(source: str) -> Iterator[str]:
    """Top-level names of the packages that a module imports, wherever in it."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b, c\nfrom . import d\ndef f():\n    from e.f import g\n"
    assert sorted(imported(source)) == ["a", "c", "e"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_import_is_asked_for(folder: str) -> None:
    asked = {canonicalize_name(requirement.name) for requirement in requirements(("test",))}
    known = installed()
    missing = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.endswith("_client.py")  # run by the environment of ci/clients.txt
        for name in imported(path.read_text(encoding="utf-8"))
        if str(path.parent.relative_to(ROOT)) not in OPTIONAL.get(name, ())
        if name not in sys.stdlib_module_names and name not in FOLDERS
        if not asked & {canonicalize_name(one) for one in known.get(name, ())}
    }
    assert missing == set()
