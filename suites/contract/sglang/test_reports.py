"""What a report of a finding prints is what its reproduction prints, without specgate's help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.pytest_plugin.traced_sample import OF_PROCESSES
from harness.core.paths import ROOT
from harness.sglang.releases import NEWEST, find_release, source_of

REPORTS = sorted((ROOT / "docs/findings").glob("*.md"))
PYTHON, PRINTED = (re.compile(rf"```{kind}\n(.*?)```", re.DOTALL) for kind in ("python", "text"))
# Only what a machine without a GPU lacks: files on the path, stubs of what needs CUDA.
RUN = """
import sys
from pathlib import Path
from harness.sglang.process import activate
from harness.sglang.releases import find_release

activate(find_release(sys.argv[1]))
for script in sys.argv[2:]:
    print("begin", Path(script).stem)
    exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def obtained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every reproduction prints: by one process, which imports sglang once."""
    if not (source_of(find_release(NEWEST)) / "sglang").is_dir():
        pytest.skip(f"sglang {NEWEST} is not installed: specgate upstream --install {NEWEST}")
    folder = tmp_path_factory.mktemp("reports")
    scripts = [folder / f"{report.stem}.py" for report in REPORTS]
    for report, script in zip(REPORTS, scripts, strict=True):
        (code,) = PYTHON.findall(report.read_text(encoding="utf-8"))
        script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, NEWEST, *map(str, scripts)],
        cwd=ROOT,
        # Nothing that coverage measures runs there.
        env={name: value for name, value in os.environ.items() if name not in OF_PROCESSES},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parts = done.stdout.partition("begin ")[2].split("begin ")
    return dict(part.split("\n", 1) for part in parts)


def test_there_are_reports() -> None:
    assert len(REPORTS) >= 8


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.stem)
def test_a_reproduction_prints_what_its_report_says(report: Path, obtained: dict[str, str]) -> None:
    text = report.read_text(encoding="utf-8")
    (code,), (printed,) = PYTHON.findall(text), PRINTED.findall(text)
    assert "harness" not in code
    assert "fixtures" not in code
    assert obtained[report.stem] == printed
