"""What ``fixtures.split_keys`` compiles, and when it ends with 1."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from fixtures import split_keys
from fixtures.drivers.package_source import package_source
from fixtures.split_keys import GATED, HELD_UP, VARIANTS, main
from harness.kernels.xqa_source import WRITES, edited

CHOSEN = "isLast = isLastCta;"
INSTALLED = "flashinfer/data/csrc/xqa/mha.cu"


def test_the_installed_source_is_left_as_it_is() -> None:
    installed = package_source(INSTALLED)
    assert edited(installed, VARIANTS["installed"]) == installed


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "installed"])
def test_a_block_knows_whether_it_is_the_last_before_it_writes(name: str) -> None:
    installed = package_source(INSTALLED)
    text = edited(installed, VARIANTS[name])
    splits, counted = text.index("bool isLast = !isMultiBlock;"), text.index(CHOSEN)
    written = text.index(GATED if "gated" in name else WRITES)
    assert splits < text.index("atom.acq_rel.gpu.global.inc") < counted < written
    assert (HELD_UP in text) is ("held_up" in name)
    held_up = text.index(HELD_UP) if HELD_UP in text else written - 1
    assert counted < held_up < written
    assert text.count("copyOutputToGlobalMem(") == installed.count("copyOutputToGlobalMem(")


def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "device = 'cpu' is not accepted; accepted: a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong_in", "code"), [("installed", 0), ("held_up", 0), ("gated", 1), ("held_up_gated", 1)]
)
def test_a_gated_source_that_is_wrong_once_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, wrong_in: str, code: int
) -> None:
    class Started:
        """A process of some source, or one beside them."""

        returncode = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            self.variant = command[command.index("--variant") + 1]

        def communicate(self) -> tuple[str, None]:
            # The first query width alone, so that what is right follows what is wrong.
            lines = [[q_len, int(self.variant == wrong_in and q_len == 1), 200] for q_len in (1, 4)]
            return "\n".join(map(json.dumps, lines)), None

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    beside: list[Any] = []
    monkeypatch.setattr(split_keys, "busy", lambda *given: beside.append(given) or nullcontext())
    monkeypatch.setattr(split_keys.subprocess, "Popen", Started)
    told = "a launch that only the gate should have kept right has another cause, once is enough"
    assert main(["--beside", "2"]) == code, told
    assert beside == [(["3"], 0), (["3"], 2)], "the GPU of the launches, and it alone"
