"""Stand-ins of the packages that sglang imports and a CPU cannot load, a reason each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from harness.sglang.stubs import flashinfer, sgl_kernel


@dataclass(frozen=True)
class Stub:
    """A package that is replaced.

    Args:
        name: of the package.
        reason: why the real one is not there.
        served: dotted name within the package -> what stands in its place; every other name is a
            class that raises when it is called.
    """

    name: str
    reason: str
    served: dict[str, Any]


STUBS = {
    stub.name: stub
    for stub in (
        Stub(
            "flashinfer",
            "its kernels are CUDA; the strict reference serves the entry points in use",
            flashinfer.SERVED,
        ),
        Stub("sgl_kernel", "its extension loads on CUDA alone", sgl_kernel.SERVED),
        Stub("torchvision", "its wheels do not load with a CPU build of torch", {}),
        Stub("setproctitle", "names the processes of a server, which nothing here starts", {}),
    )
}


ABSENT = object()
"""In the place of a stand-in: importing the name fails."""


class _Missing(type):
    """A name of a stub that nothing stands in for; its attributes are names, too."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} has no stand-in on a CPU")


class _StubModule(ModuleType):
    """Any name is there; what the table does not serve raises when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package, _, inside = self.__name__.partition(".")
        served = STUBS[package].served
        dotted = f"{inside}.{name}" if inside else name
        if dotted not in served and any(key.startswith(f"{dotted}.") for key in served):
            return sys.modules.setdefault(f"{package}.{dotted}", _StubModule(f"{package}.{dotted}"))
        if served.get(dotted) is ABSENT:
            raise AttributeError(f"{self.__name__} has no {name}")
        value = served.get(dotted) or _Missing(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class StubFinder(MetaPathFinder, Loader):
    """Finds the stubbed packages and every module inside them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a stubbed package's modules, None for all others."""
        package, _, inside = fullname.partition(".")
        if package not in STUBS or STUBS[package].served.get(inside) is ABSENT:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module that answers to any name."""
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Its version satisfies every check of a lower bound."""
        module.__version__ = "99.0"  # type: ignore[attr-defined]
