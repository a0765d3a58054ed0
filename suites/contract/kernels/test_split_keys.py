"""The edits of ``fixtures.split_keys`` meet the source of the FlashInfer that is pinned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fixtures import split_keys
from fixtures.drivers.package_source import package_source
from fixtures.split_keys import GATED, HELD_UP, SOURCE, VARIANTS, WRITES, edited, main
from harness.errors import UsageError
from harness.kernels.packages import WANTED

CHOSEN = "isLast = isLastCta;"


def installed() -> str:
    name, version = WANTED["flashinfer"].split()
    return package_source(name, version, f"flashinfer/data/csrc/{SOURCE}")


def test_the_installed_source_is_left_as_it_is() -> None:
    assert edited(installed(), VARIANTS["installed"]) == installed()


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "installed"])
def test_a_block_knows_whether_it_is_the_last_before_it_writes(name: str) -> None:
    text = edited(installed(), VARIANTS[name])
    splits, counted = text.index("bool isLast = !isMultiBlock;"), text.index(CHOSEN)
    written = text.index(GATED if "gated" in name else WRITES)
    assert splits < text.index("atom.acq_rel.gpu.global.inc") < counted < written
    assert (HELD_UP in text) is ("held up" in name)
    held_up = text.index(HELD_UP) if HELD_UP in text else written - 1
    assert counted < held_up < written
    assert text.count("copyOutputToGlobalMem(") == installed().count("copyOutputToGlobalMem(")


@pytest.mark.parametrize("text", ["", f"{WRITES}\n{WRITES}"])
def test_a_source_without_the_place_is_refused(text: str) -> None:
    places = f"{text.count(WRITES)} places"
    told = f"xqa/mha.cu = '{places}' is not accepted; accepted: one place of 'if"
    with pytest.raises(UsageError, match=told):
        edited(text, [(WRITES, GATED)])


def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "device = 'cpu' is not accepted; accepted: a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong_in", "code"), [("installed", 0), ("held up", 0), ("gated", 1), ("held up, gated", 1)]
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

        def kill(self) -> None:
            assert self.variant == "busy"

        wait = kill

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(split_keys.subprocess, "Popen", Started)
    told = "a launch that only the gate should have kept right has another cause, once is enough"
    assert main(["--beside", "2"]) == code, told
