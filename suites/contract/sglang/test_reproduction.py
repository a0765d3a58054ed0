"""A script of a trial needs no specgate, ends with 1 where the release is wrong and 0 elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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


# A process imports sglang once for all scripts; nothing of specgate can be imported there.
RUN = """
import gc, runpy, sys

gc.disable()
sys.modules.update(harness=None, fixtures=None)
for script in sys.argv[1:]:
    print("begin", flush=True)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        print("ended with", int(ended.code))
"""


@pytest.fixture(scope="module")
def obtained(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Lines of each of ``SCRIPTS``, and how it ended, with the release alone on the path."""
    release = find_release(NEWEST)
    if not (source_of(release) / "sglang").is_dir():
        pytest.skip(f"sglang {NEWEST} is not installed: specgate upstream --install {NEWEST}")
    folder = tmp_path_factory.mktemp("scripts")
    paths = [folder / f"{number}.py" for number in range(len(SCRIPTS))]
    for path, text in zip(paths, SCRIPTS, strict=True):
        path.write_text(text(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, *map(str, paths)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{source_of(release)}{os.pathsep}{packages_of(release)}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    told = done.stdout.partition("begin\n")[2].split("begin\n")
    assert len(told) == len(SCRIPTS), done.stderr[-2000:]
    return [text.splitlines() for text in told]


def with_other_pages() -> str:
    """A script whose page table is not the one that it expects."""
    text = script(*find_trial(VERIFY))
    other = text.replace("(page_ids[:, :, None]", "(page_ids.flip(0)[:, :, None]")
    assert other != text
    return other


SCRIPTS: tuple[Callable[[], str], ...] = (
    lambda: script(*find_trial(MLA)),
    lambda: script(*find_trial(MHA)),
    with_other_pages,
)


def test_the_red_draft_of_mla_ends_with_1(obtained: list[list[str]]) -> None:
    wanted = [f"step {i}: lengths obtained [5, 130], expected {n}" for i, n in enumerate(STEPS)]
    assert obtained[0] == [*wanted, "ended with 1"]


def test_the_green_draft_of_mha_ends_with_0(obtained: list[list[str]]) -> None:
    wanted = [f"step {i}: lengths obtained {n}, expected {n}" for i, n in enumerate(STEPS)]
    assert obtained[1] == [*wanted, "ended with 0"]


def test_a_page_table_of_other_pages_ends_with_1(obtained: list[list[str]]) -> None:
    assert [line.partition(" obtained")[0] for line in obtained[2]] == [
        "step 0: lengths",
        "step 0: page table of request 0",
        "step 0: page table of request 1",
        "ended with 1",
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
