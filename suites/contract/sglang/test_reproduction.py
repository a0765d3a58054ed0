"""A script of a trial needs no specgate, ends with 1 where the release is wrong and 0 elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.minimise import find_trial, main
from fixtures.reproduction import WRITABLE, script
from harness.errors import UsageError
from harness.sglang.releases import NEWEST, find_release, packages_of, source_of

pytestmark = pytest.mark.untraced
MLA = f"mla-multi_step_draft-bs2_ragged-sglang-{NEWEST}/trtllm_mla/trtllm_gen-eager"
MHA = f"mha-multi_step_draft-bs2_ragged-sglang-{NEWEST}/trtllm_mha/xqa-eager"
VERIFY = f"mha-target_verify-bs2_ragged-sglang-{NEWEST}/trtllm_mha/xqa-eager"
# Committed 5 and 130: each step attends to one key more, by hand.
STEPS = [[6, 131], [7, 132], [8, 133], [9, 134]]


def run(text: str, folder: Path) -> tuple[int, list[str]]:
    """Exit code and lines of a script with the release alone on the path."""
    release = find_release(NEWEST)
    if not (source_of(release) / "sglang").is_dir():
        pytest.skip(f"sglang {NEWEST} is not installed: specgate upstream --install {NEWEST}")
    path = folder / "script.py"
    blocked = "import sys; sys.modules.update(harness=None, fixtures=None)\n"
    path.write_text(blocked + text, encoding="utf-8")
    paths = os.pathsep.join(map(str, (source_of(release), packages_of(release))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert lines, done.stderr[-2000:]
    return done.returncode, lines


def test_the_red_draft_of_mla_ends_with_1(tmp_path: Path) -> None:
    code, lines = run(script(*find_trial(MLA)), tmp_path)
    wanted = [f"step {i}: lengths obtained [5, 130], expected {n}" for i, n in enumerate(STEPS)]
    assert (code, lines) == (1, wanted)


def test_the_green_draft_of_mha_ends_with_0(tmp_path: Path) -> None:
    code, lines = run(script(*find_trial(MHA)), tmp_path)
    wanted = [f"step {i}: lengths obtained {n}, expected {n}" for i, n in enumerate(STEPS)]
    assert (code, lines) == (0, wanted)


def test_a_page_table_of_other_pages_ends_with_1(tmp_path: Path) -> None:
    text = script(*find_trial(VERIFY))
    other = text.replace("(page_ids[:, :, None]", "(page_ids.flip(0)[:, :, None]")
    assert other != text
    code, lines = run(other, tmp_path)
    assert code == 1
    assert [line.partition(" obtained")[0] for line in lines] == [
        "step 0: lengths",
        "step 0: page table of request 0",
        "step 0: page table of request 1",
    ]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            MLA,
            [
                "MODE, CONTEXT_LEN, PAGE_SIZE = 'multi_step_draft', 256, 64",
                "COMMITTED, WIDTH, STEPS = [5, 130], 4, 5",
                "class Backend(theirs.TRTLLMMLABackend):",
                "    plan = one.forward_decode_metadata",
            ],
        ),
        (
            VERIFY,
            [
                "MODE, CONTEXT_LEN, PAGE_SIZE = 'target_verify', 256, 32",
                "class Backend(theirs.TRTLLMHAAttnBackend):",
                "    plan = one.forward_metadata",
            ],
        ),
    ],
)
def test_a_script_has_the_numbers_of_its_trial(name: str, lines: list[str]) -> None:
    written = script(*find_trial(name)).splitlines()
    missing = [line for line in lines if line not in written]
    assert missing == [], (
        f"a script has its trial's mode, lengths, steps and class; it lacks {missing}"
    )


@pytest.mark.parametrize(
    "name",
    [
        f"mha-multi_step_draft-dp_padding-sglang-{NEWEST}/trtllm_mha/xqa-eager",
        "mha-decode-bs2_ragged-trtllm_mha/xqa-eager",
        f"mha-decode-bs2_ragged-sglang-{NEWEST}/triton/triton-eager",
        f"mha-decode-bs2_ragged-sglang-{NEWEST}/trtllm_mha/xqa-graph",
        f"mha-extend-bs2_ragged-sglang-{NEWEST}/trtllm_mha/xqa-eager",
        f"mha-decode-window_of_one_page-sglang-{NEWEST}/trtllm_mha/xqa-eager",
        "mla-multi_step_draft-bs2_ragged-sglang-0.5.14/trtllm_mla/trtllm_gen-eager",
    ],
)
def test_what_cannot_be_written_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="--script: trial"):
        script(*find_trial(name))
    with pytest.raises(SystemExit, match="2"):
        main([name, "--script", str(tmp_path / "never.py")])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"--script: trial = '{name}' is not accepted; accepted: {WRITABLE}"
    assert not (tmp_path / "never.py").exists()
