"""XQA is compiled from a source whose last block alone writes the answer (flashinfer#4161)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.drivers.package_source import package_source
from fixtures.fakes.fake_kernels import MODULES
from harness.errors import UsageError
from harness.kernels import flashinfer_xqa, workspace
from harness.kernels.flashinfer_xqa import FlashInferXQA
from harness.kernels.xqa_source import COUNTED, WRITES, compile_edited, edited

GATED = "    if (isLast && warpGrpIdx == 0) {\n#if SPEC_DEC\n      copyOutputToGlobalMem("


def installed(path: str = "data/csrc/xqa/mha.cu") -> str:
    return package_source(f"flashinfer/{path}")


@dataclass
class Spec:
    """What ``gen_xqa_module`` gives: the fields of FlashInfer's ``JitSpec`` that are read."""

    name: str
    sources: list[Path]
    extra_include_dirs: list[Path] | None = None


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A FlashInfer of the version that is pinned; its modules are compiled from sources here."""
    csrc = tmp_path / "csrc/xqa"
    csrc.mkdir(parents=True)
    sources = [csrc / name for name in ("xqa_wrapper.cu", "mha.cu", "mha_sm90.cu")]
    for source in sources:
        source.write_text(installed() if source.name == "mha.cu" else "another")
    xqa = SimpleNamespace(gen_xqa_module=lambda q_len: Spec(f"xqa_{q_len}", list(sources)))
    xqa.get_xqa_module = cache(lambda q_len: xqa.gen_xqa_module(q_len))
    env = SimpleNamespace(FLASHINFER_GEN_SRC_DIR=tmp_path / "generated")
    package = SimpleNamespace(__version__="0.6.12", csrc=csrc, xqa=xqa)
    mine = {
        "flashinfer": package,
        "flashinfer.xqa": xqa,
        "flashinfer.jit": SimpleNamespace(env=env),
    }
    for name, module in {**MODULES, **mine}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_xqa, "cuda_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(workspace, "_SHARED", {})
    monkeypatch.setattr(workspace, "SIZES", dict.fromkeys(workspace.SIZES, 9 * workspace.MIB))
    return package


def compiled(flashinfer: Any, q_len: int = 4) -> tuple[Spec, str]:
    """What FlashInfer compiles for XQA now, and the text of its ``mha.cu``."""
    spec = flashinfer.xqa.get_xqa_module(q_len)
    (source,) = (source for source in spec.sources if source.name == "mha.cu")
    return spec, source.read_text()


@pytest.mark.parametrize("version", ["0.6.12", "0.6.16", "0.6.16.post1+cu130"])
def test_a_kernel_is_compiled_so_that_the_last_block_alone_writes(
    flashinfer: Any, version: str
) -> None:
    flashinfer.__version__ = version
    before, ungated = compiled(flashinfer)  # by somebody else in this process, and kept
    FlashInferXQA("cuda")
    spec, text = compiled(flashinfer)
    told = "a block that is held up does not write its part over the answer to all keys"
    assert (ungated.count(GATED), text.count(GATED), text.count(WRITES)) == (0, 1, 0), told
    places = ["bool isLast = !isMultiBlock;", "isLast = isLastCta;", GATED]
    assert sorted(places, key=text.index) == places, told
    assert spec.name != before.name, "what was compiled ungated is not taken for it"
    assert [source.name for source in spec.sources] == ["xqa_wrapper.cu", "mha.cu", "mha_sm90.cu"]
    assert [spec.sources[i] for i in (0, 2)] == [before.sources[i] for i in (0, 2)]
    assert spec.extra_include_dirs == [flashinfer.csrc], "its headers are beside the installed one"
    assert (flashinfer.csrc / "mha.cu").read_text() == installed(), "which stays as it is"


@pytest.mark.parametrize("version", ["0.6.17", "0.6.17rc1", "0.7.2", "0.10.0"])
def test_a_version_that_is_right_is_compiled_as_it_is(flashinfer: Any, version: str) -> None:
    flashinfer.__version__ = version
    FlashInferXQA("cuda")
    assert compiled(flashinfer)[0].name == "xqa_4"


def test_a_second_kernel_compiles_nothing_again(flashinfer: Any) -> None:
    FlashInferXQA("cuda")
    first, _ = compiled(flashinfer)
    source = next(source for source in first.sources if source.name == "mha.cu")
    written = source.stat().st_mtime_ns
    FlashInferXQA("cuda")
    assert compiled(flashinfer)[0] is first
    assert flashinfer.xqa.gen_xqa_module(4).name == first.name, "edits are not made twice"
    assert source.stat().st_mtime_ns == written, "a source that is written again is compiled again"


def test_a_source_of_another_make_is_written_anew(flashinfer: Any) -> None:
    FlashInferXQA("cuda")
    compiled(flashinfer)
    (flashinfer.csrc / "mha.cu").write_text(installed() + "// later\n")
    flashinfer.xqa.get_xqa_module.cache_clear()
    assert compiled(flashinfer)[1].endswith("// later\n")


def test_other_edits_take_the_place_of_these(flashinfer: Any) -> None:
    FlashInferXQA("cuda")
    gated, _ = compiled(flashinfer)
    compile_edited(COUNTED, "another")
    spec, text = compiled(flashinfer)
    assert spec.name == "xqa_4_another" != gated.name
    assert WRITES in text


def test_a_source_without_the_place_is_refused(flashinfer: Any) -> None:
    for text in ("", f"{installed()}\n{WRITES}"):
        (flashinfer.csrc / "mha.cu").write_text(text)
        FlashInferXQA("cuda")
        with pytest.raises(
            UsageError, match=r"mha\.cu = '\d places' is not accepted; accepted: one"
        ):
            compiled(flashinfer)


def test_edits_follow_each_other() -> None:
    assert edited("a b", (("a", "c"), ("c b", "d"))) == "d"


def test_flashinfer_compiles_what_is_put_in_place() -> None:
    """Read, since it is imported on no machine without CUDA."""
    assert "from .jit.xqa import gen_xqa_module" in installed("xqa.py")
    cached, _, body = installed("xqa.py").partition("def get_xqa_module(")
    assert cached.endswith("@functools.cache\n")
    assert "module = gen_xqa_module(" in body.partition("def ")[0]
    assert ").build_and_load()" in body.partition("def ")[0]
    assert '"xqa/mha.cu"' in installed("jit/xqa.py")
    fields = installed("jit/core.py").partition("class JitSpec:")[2].partition("def ")[0]
    for name in ("name: str", "sources: List[Path]", "extra_include_dirs: Optional[List[Path]]"):
        assert f"    {name}\n" in fields
