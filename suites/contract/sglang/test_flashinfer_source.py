"""A checkout of FlashInfer decides which calls of sglang's backends are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import KernelRefusal
from harness.sglang.flashinfer_source import definition, hold_to
from harness.sglang.stubs import ABSENT, STUBS, Stub, StubFinder


def decode(query: int, page_size: int = 1, window_left: int = -1) -> tuple[int, int, int]:
    return query, page_size, window_left


class Wrapper:
    def __init__(self, layout: str) -> None:
        self.layout = layout

    def plan(self, indptr: int, causal: bool = True, **more: int) -> tuple[int, bool]:
        return indptr + sum(more.values()), causal

    begin_forward = plan

    def plan_twice(self) -> tuple[int, bool]:
        return self.plan(5, causal=True, internal=1)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "__init__.py": "from .decode import Wrapper \nfrom .mla import latent\n",
        "decode.py": (
            "from typing import overload\n"
            "@overload\ndef decode(query): ...\n"
            "def decode(query, page_size=16, *, window_left=NEVER, sinks=None): ...\n"
            "class Wrapper:\n"
            "    def __init__(self, layout, backend='auto'): ...\n"
            "    def plan(self, indptr, causal=False): ...\n"
            "    begin_forward = plan\n"
            "    def plan_twice(self): ...\n"
            "def get_module():\n"
            "    def decode(self, run): ...\n"
            "class Module:\n"
            "    def decode(self): ...\n"
            "if True:\n"
            "    def on_condition(query): ...\n"
            "from .jit import *\n"
        ),
        "jit.py": "def build(): ...\n",
        "mla/__init__.py": "from ._core import *\n",
        "mla/sm90/core.py": "from ...decode import decode\n",
        "mla/_core.py": "from ..decode import decode\ndef latent(query, *, pages): ...\n",
    }
    for name, text in files.items():
        file = tmp_path / "flashinfer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.fixture
def served(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    names = {"decode.decode": decode, "Wrapper": Wrapper, "decode.gone": decode, "latent": decode}
    stub = Stub("flashinfer", "a toy", names)
    monkeypatch.setitem(STUBS, "flashinfer", stub)
    hold_to(checkout)
    return stub.served


def test_a_default_of_the_checkout_is_what_a_caller_leaves_out(served: dict[str, Any]) -> None:
    made = served["decode.decode"](7)
    told = (
        "page_size, window_left left out are of the module's own decode, not of a method so named"
    )
    assert made == (7, 16, -1), f"{told}: (7, 16, -1), not {made}"
    made = served["decode.decode"](7, 32, window_left=4)
    assert made == (7, 32, 4), f"what a caller gives stays: (7, 32, 4), not {made}"


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((7, 1, 4), {}, "too many positional arguments"),
        ((7,), {"mask": 1}, "unexpected keyword argument 'mask'"),
        ((), {}, "missing a required argument: 'query'"),
    ],
)
def test_a_call_that_the_checkout_does_not_take_is_refused(
    served: dict[str, Any], args: tuple[int, ...], kwargs: dict[str, int], message: str
) -> None:
    with pytest.raises(KernelRefusal, match=rf"flashinfer\.decode\.decode: .*{message}"):
        served["decode.decode"](*args, **kwargs)


def test_methods_and_their_aliases_are_held_too(served: dict[str, Any]) -> None:
    wrapper = served["Wrapper"]("NHD")
    assert isinstance(wrapper, Wrapper)
    assert wrapper.plan(3) == wrapper.begin_forward(3) == (3, False)
    for method in (wrapper.plan, wrapper.begin_forward):
        with pytest.raises(KernelRefusal, match=r"flashinfer\.Wrapper\.\w+: .*'window'"):
            method(3, window=1)


def test_what_a_stand_in_calls_itself_is_not_held(served: dict[str, Any]) -> None:
    assert served["Wrapper"]("NHD").plan_twice() == (6, True)


def test_a_name_that_the_checkout_lacks_cannot_be_imported(served: dict[str, Any]) -> None:
    assert served["decode.gone"] is ABSENT
    finder = StubFinder()
    spec = finder.find_spec("flashinfer.decode", None)
    assert spec is not None
    module: Any = finder.create_module(spec)
    assert module.decode is served["decode.decode"]
    with pytest.raises(AttributeError, match=r"flashinfer\.decode has no gone"):
        _ = module.gone
    # An import of a name that a module lacks looks for a module of that name.
    assert finder.find_spec("flashinfer.decode.gone", None) is None
    assert finder.find_spec("flashinfer.decode.another", None) is not None


def test_definitions_are_found_through_packages_and_stars(checkout: Path) -> None:
    latent = definition(checkout, "flashinfer.latent")
    assert latent is not None
    assert latent.name == "latent"
    above = definition(checkout, "flashinfer.mla._core.decode")
    assert above is not None, "a name is found in the package above its module's"
    higher = definition(checkout, "flashinfer.mla.sm90.core.decode")
    assert higher is not None, "a name is found two packages above its module's"
    conditional = definition(checkout, "flashinfer.decode.on_condition")
    assert conditional is not None, "what is defined under a condition is defined"
    assert definition(checkout, "flashinfer.decode.nothing") is None
    assert definition(checkout, "flashinfer.no_module.decode") is None


def test_a_keyword_without_a_default_is_required(served: dict[str, Any]) -> None:
    with pytest.raises(KernelRefusal, match=r"flashinfer\.latent: missing .* argument: 'pages'"):
        served["latent"](7)


def test_a_call_that_raised_leaves_the_next_one_held(served: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="'pages'"):
        served["latent"](7, pages=1)  # which the checkout takes, and the stand-in does not
    either = (KernelRefusal, TypeError)
    with pytest.raises(either, match="unexpected keyword argument 'mask'") as refused:
        served["decode.decode"](7, mask=1)
    told = "a call after one that raised is refused by the checkout's signature, before it is run"
    assert refused.type is KernelRefusal, f"{told}: {refused.type.__name__}"
