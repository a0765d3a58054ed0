"""Imports single files of sglang alone: whatever else of it they name is a stub."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = "sglang"


class Stub:
    """Any name of a stub module: a class whose instances are false, as "is it there?" wants."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> type[Stub]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Stub,), {})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, root: Path, modules: Collection[str]) -> None:
        self._root, self._modules = root, modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        if fullname in self._modules:
            file = self._root / (fullname.replace(".", "/") + ".py")
            return spec_from_file_location(fullname, file)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def alone(root: Path, modules: Collection[str]) -> Iterator[None]:
    """Inside, ``modules`` of sglang are files, every other is a stub; an installed one returns.

    Args:
        root: holds ``sglang/…``, as a wheel does.
        modules: their names, ``sglang.…``.
    """
    finder, held = _Finder(root, modules), _taken()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _taken()
        sys.modules.update(held)


def _taken() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}
