"""Files of a release are extracted and imported alone, or one line says how to get them."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fixtures.latency.latency_arms import OwnIteration, ReleasedIteration, disagreements
from fixtures.latency.latency_scene import Scene, set_scene
from fixtures.tables.latency import Point
from harness.errors import UsageError
from harness.upstream import released_wheel
from harness.upstream.released_wheel import FOLDER, WHEELS, Wheel
from harness.upstream.stub_modules import alone

MADE_UP = Wheel("9.9", (released_wheel.BACKEND, "sglang.kernels.fill"))
BACKEND = """
from __future__ import annotations
from dataclasses import dataclass
from types import SimpleNamespace
import torch
from sglang.kernels.fill import fill
from sglang.srt.layers.base import Base, unknown as renamed
from sglang.srt.utils import is_flashinfer_available
import sglang.srt.environ
if is_flashinfer_available():
    import flashinfer

@dataclass
class Planned:
    cache_seqlens_int32: torch.Tensor = None
    page_table: torch.Tensor = None

class TRTLLMHAAttnBackend(Base):
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.limits = max_bs, max_num_tokens

    def _build_cuda_graph_metadata(self, bs, num_tokens, forward_mode, spec_info, device):
        self.width = num_tokens // bs

    def _apply_cuda_graph_metadata(self, bs, req_pool_indices, seq_lens, forward_mode, spec_info):
        more = self.speculative_step_id + 1 if forward_mode.is_decode_or_idle() else 0
        if forward_mode.is_target_verify():
            more = self.width
        table = fill(self.req_to_token, req_pool_indices, self.page_size)
        self.forward_metadata = Planned((seq_lens + more).int(), table)
"""
FILL = """
import sglang.gone.entirely

def fill(table, rows, page_size):
    return table[rows][:, ::page_size] // page_size
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "sglang-9.9-py3-none-any.whl"
    backend, fill = MADE_UP.files
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(backend, BACKEND)
        made.writestr(fill, FILL)
        made.writestr("sglang/__init__.py", "raise RuntimeError('imported')")
    return path


@pytest.fixture
def folder(tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    released_wheel.extract(archive, MADE_UP, tmp_path / "wheels")
    monkeypatch.setenv(FOLDER, str(tmp_path / "wheels"))
    return tmp_path / "wheels"


@pytest.fixture
def scene() -> Scene:
    return set_scene(Point(512, 3, 1024), "cpu")


def test_nothing_but_the_files_wanted_is_extracted(folder: Path) -> None:
    found = {str(path.relative_to(folder / "9.9")) for path in folder.rglob("*.py")}
    assert found == set(MADE_UP.files)


def test_a_wheel_without_a_file_is_refused(tmp_path: Path, archive: Path) -> None:
    other = replace(MADE_UP, modules=(released_wheel.BACKEND, "sglang.moved"))
    with pytest.raises(UsageError, match=r"sglang-9.9\S* lacks sglang/moved.py"):
        released_wheel.extract(archive, other, tmp_path)


def test_an_installed_sglang_is_untouched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ModuleType("sglang")
    inside = ModuleType("sglang.srt")
    monkeypatch.setitem(sys.modules, "sglang", installed)
    monkeypatch.setitem(sys.modules, "sglang.srt", inside)
    finders = list(sys.meta_path)
    assert released_wheel.load(MADE_UP).__name__ == released_wheel.CLASS
    told = "is the installed one in sys.modules after a wheel was loaded"
    assert sys.modules.get("sglang") is installed, f"sglang {told}"
    assert sys.modules.get("sglang.srt") is inside, f"sglang.srt, imported before, {told}"
    assert released_wheel.BACKEND not in sys.modules, "no module of the wheel stays in sys.modules"
    assert sys.meta_path == finders, "no finder of the wheel stays in sys.meta_path"


def test_a_release_plans_our_scene_as_we_do(folder: Path, scene: Scene) -> None:
    ours, theirs = OwnIteration(scene), ReleasedIteration(MADE_UP, scene)
    for mla in (ours, OwnIteration(scene, mla=True)):
        mla.plan()
        mla.record()
        assert len(mla.parts()) == 4
        theirs.record()
        assert disagreements(theirs.parts(), mla.parts()) == []
    lengths = [part.lengths - scene.seq_lens for part in ours.parts()]
    assert [set(more.tolist()) for more in lengths] == [{1}, {2}, {4}, {4}]


@pytest.mark.parametrize(
    ("tensor", "place", "told"),
    [("lengths", (2,), "lengths of phase 1"), ("table", (0, 3), "page table of phase 1")],
)
def test_a_plan_that_differs_is_told(
    folder: Path, scene: Scene, tensor: str, place: Any, told: str
) -> None:
    ours, theirs = OwnIteration(scene), ReleasedIteration(MADE_UP, scene)
    ours.record()
    theirs.record()
    getattr(theirs.parts()[1], tensor)[place] += 1
    assert disagreements(theirs.parts(), ours.parts()) == [told]


def test_stale_pages_after_a_request_are_no_difference(folder: Path, scene: Scene) -> None:
    ours, theirs = OwnIteration(scene), ReleasedIteration(MADE_UP, scene)
    ours.record()
    theirs.record()
    live = int(-(-ours.parts()[0].lengths[1] // 64))
    theirs.parts()[0].table[1, live] += 1
    assert disagreements(theirs.parts(), ours.parts()) == []


def test_a_checkout_is_loaded_by_what_is_named_after_the_backend(
    tmp_path: Path, scene: Scene
) -> None:
    attention = tmp_path / "sglang/srt/layers/attention"
    attention.mkdir(parents=True)
    (tmp_path / "sglang/__init__.py").write_text("raise RuntimeError('imported')")
    (attention / "trtllm_mha_fill.py").write_text(FILL)
    near = BACKEND.replace("sglang.kernels.fill", "sglang.srt.layers.attention.trtllm_mha_fill")
    (attention / "trtllm_mha_backend.py").write_text(near)
    wheel = Wheel.of_folder(tmp_path)
    assert wheel.modules == (
        "sglang.srt.layers.attention.trtllm_mha_backend",
        "sglang.srt.layers.attention.trtllm_mha_fill",
    )
    ours, theirs = OwnIteration(scene), ReleasedIteration(wheel, scene, tmp_path)
    ours.record()
    theirs.record()
    assert disagreements(theirs.parts(), ours.parts()) == []
    assert not theirs.reads_host


def test_a_release_that_reads_lengths_on_the_host_is_given_them(
    tmp_path: Path, scene: Scene
) -> None:
    path = tmp_path / "sglang/srt/layers/attention/trtllm_mha_backend.py"
    path.parent.mkdir(parents=True)
    takes = "seq_lens, forward_mode, spec_info"
    text = BACKEND.replace(takes, f"{takes}, seq_lens_cpu").replace("from sglang.kernels.fill", "#")
    path.write_text(text.replace("fill(self", "(lambda t, r, p: t[r][:, ::p] // p)(self"))
    theirs = ReleasedIteration(Wheel.of_folder(tmp_path), scene, tmp_path)
    assert theirs.reads_host
    theirs.record()
    assert theirs.parts()[2].lengths.tolist() == (scene.seq_lens + 4).tolist()


def test_a_release_that_plans_otherwise_is_refused(tmp_path: Path, scene: Scene) -> None:
    with pytest.raises(UsageError, match=r"a folder that holds sglang\.srt"):
        Wheel.of_folder(tmp_path)
    path = tmp_path / "sglang/srt/layers/attention/trtllm_mha_backend.py"
    path.parent.mkdir(parents=True)
    path.write_text("class TRTLLMHAAttnBackend: pass")
    with pytest.raises(UsageError, match="accepted: a backend with _apply_cuda_graph_metadata"):
        ReleasedIteration(Wheel.of_folder(tmp_path), scene, tmp_path)


def stand_in(monkeypatch: pytest.MonkeyPatch, archive: Path | None) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if archive:
            into = Path(command[command.index("-d") + 1])
            (into / archive.name).write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess(command, 0 if archive else 1, "", "log\nno network\n")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_release_is_downloaded_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, archive: Path
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    calls = stand_in(monkeypatch, archive)
    for _ in range(2):
        assert released_wheel.located(MADE_UP) == tmp_path / ".cache/specgate/wheels/9.9"
    [command] = calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "sglang==9.9"


@pytest.mark.parametrize(
    ("given", "reason"),
    [(True, "SPECGATE_WHEELS is set, so nothing is downloaded"), (False, "no network")],
)
def test_a_missing_release_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: bool, reason: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(FOLDER, raising=False)
    if given:
        monkeypatch.setenv(FOLDER, str(tmp_path / "none"))
    stand_in(monkeypatch, None)
    with pytest.raises(UsageError) as told:
        released_wheel.load(MADE_UP)
    line = str(told.value)
    assert "\n" not in line
    assert "sglang 9.9 is not in" in line
    assert reason in line
    assert line.endswith(f"python -m harness wheels --into {released_wheel.cache()}")


def test_a_release_that_lacks_a_file_is_missing(folder: Path) -> None:
    (folder / "9.9" / MADE_UP.files[1]).unlink()
    with pytest.raises(UsageError, match=r"^sglang 9\.9 is not in "):
        released_wheel.located(MADE_UP)


def test_wheels_fills_a_folder_with_every_release(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    archive: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in(monkeypatch, archive)
    monkeypatch.setattr(released_wheel, "WHEELS", {"9.9": MADE_UP})
    assert released_wheel.main(["--into", str(tmp_path / "into")]) == 0
    assert (tmp_path / "into/9.9" / MADE_UP.files[0]).is_file()
    assert "sglang 9.9: 2 files in" in capsys.readouterr().out
    stand_in(monkeypatch, None)
    with pytest.raises(SystemExit, match="2"):
        released_wheel.main(["--into", str(tmp_path / "into")])
    assert "cannot be downloaded: no network" in capsys.readouterr().err


def test_every_release_has_its_backend_first() -> None:
    assert list(WHEELS) == ["0.5.13", "0.5.14", "0.5.16", "0.5.23"]
    assert all(one.files[0].endswith("/trtllm_mha_backend.py") for one in WHEELS.values())
    assert torch.int32 == set_scene(Point(64, 1, 128), "cpu").table.req_to_token.dtype


def test_a_class_may_inherit_from_two_that_are_absent(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    told = "from sglang.srt.base import Backend, Mixin\nclass Own(Backend, Mixin): ...\n"
    (tmp_path / "sglang" / "own.py").write_text(told)
    with alone(tmp_path, ["sglang.own"]):
        made = importlib.import_module("sglang.own").Own
    bases = [base.__name__ for base in made.__bases__]
    assert bases == ["Backend", "Mixin"], f"each name of a stub is a class of its own: {bases}"
