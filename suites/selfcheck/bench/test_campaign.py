"""Every row of the campaign is a benchmark that can be planned, and each GPU takes the next one."""

from __future__ import annotations

import gzip
import json
import shlex
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fixtures import bench, campaign
from fixtures.tables.campaign import COMPARISONS, POOL, SHAPE_OF
from fixtures.tables.shapes import SHAPES
from harness.errors import UsageError
from harness.plugin.served import SERVED

ROWS = tuple(COMPARISONS.values())
ONCE = "each row of a campaign is measured once, whichever GPU takes it"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_is_planned(row):
    asked = bench.setup(bench.parser().parse_args(row.words(139.0)))
    assert asked.a.shape == asked.b.shape == SHAPE_OF[row.family]
    assert not asked.sized
    assert asked.rehearsed == (asked.a, asked.b)
    for workload in asked.workloads:
        drafted = 3 * workload.batch_size
        longest = workload.input_len + workload.output_len
        assert workload.batch_size * longest + drafted <= POOL
        assert (
            longest
            <= SHAPES[row.family and SHAPE_OF[row.family]].configuration(draft=False)[
                "max_position_embeddings"
            ]
        )


def test_both_arms_of_a_candidate_are_rehearsed_whichever_session_comes_first():
    words = [*ROWS[0].words(139.0), "--sessions", "A/A,candidate"]
    asked = bench.setup(bench.parser().parse_args(words))
    assert asked.rehearsed == (asked.a, asked.b)


@pytest.mark.parametrize(
    ("gib", "mha", "mla"),
    [(139.8, "4", "2"), (79.6, "2", "2"), (24.0, "2", "2"), (180.0, "4", "4")],
)
def test_as_many_blocks_at_a_time_as_a_gpu_has_room_for(gib, mha, mla):
    for name, expected in (("mha-fa3", mha), ("mla-fa3", mla)):
        words = COMPARISONS[name].words(gib)
        assert words[words.index("--side-by-side") + 1] == expected


def test_every_baseline_is_on_trial():
    named = {
        arm.partition("backend=")[2].partition(",")[0] for row in ROWS for arm in (row.a, row.b)
    }
    assert {name for name in named if name.startswith("specgate")} == set(SERVED)


def test_unless_both_passes_and_blocks_are_given_a_shape_is_sized():
    words = ["--a", "sglang:shape=llama-3.1-8b", "--sessions", "A/A"]
    for more, sized in (
        ([], True),
        (["--passes", "1"], True),
        (["--blocks-at-most", "3"], True),
        (["--passes", "1", "--blocks-at-most", "3"], False),
    ):
        assert bench.setup(bench.parser().parse_args([*words, *more])).sized is sized


def test_a_margin_narrows_the_step_time_alone_and_is_what_is_injected():
    words = ["--a", "sglang:shape=llama-3.1-8b,phases=on", "--sessions", "A/A"]
    usual, narrowed = (
        bench.setup(bench.parser().parse_args([*words, *more]))
        for more in ([], ["--margin", "0.005"])
    )
    for before, after in zip(usual.margins, narrowed.margins, strict=True):
        if before.metric != "step_time":
            assert after == before, f"--margin narrows step_time alone, not {after.metric}"
            continue
        wide, narrow = (before.delta0, before.delta1), (after.delta0, after.delta1)
        assert wide == (0.002, 0.01), f"delta0 and delta1 of a step are 0.2 and 1 %, not {wide}"
        rule = "--margin 0.005 halves delta0 of a step with its delta1"
        assert narrow == (0.001, 0.005), f"{rule}: (0.001, 0.005), not {narrow}"
    said = "the injected slowdown is the margin that cases are judged by, unless it is given"
    assert (usual.slowdown, narrowed.slowdown) == (0.01, 0.005), said
    more = ["--margin", "0.005", "--injected", "0.02"]
    assert bench.setup(bench.parser().parse_args([*words, *more])).slowdown == 0.02, said


def test_phases_may_cost_half_a_percent_and_no_other_row_has_a_margin_of_its_own():
    margins = {row.id: row.margin for row in ROWS if row.margin is not None}
    assert margins == {"phases": 0.005}
    words = COMPARISONS["phases"].words(139.0)
    assert words[words.index("--margin") + 1] == "0.005"


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that writes down its GPU and its words, and takes a while."""
    log = tmp_path / "asked"
    log.mkdir()
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys, time\n"
        f"name = os.path.join({str(log)!r}, str(time.monotonic_ns()))\n"
        "json.dump([os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:]], open(name, 'w'))\n"
        "print('began')\n"
        "print('said', os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "time.sleep(0.2)\n"
        "sys.exit(2 if 'phases' in sys.argv[-4] else 0)\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(campaign.sys, "executable", str(script))
    return log


def test_each_gpu_takes_the_next_row(recorder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    out = tmp_path / "records"
    ids = ["mha-fa3", "mla-kv_indices", "mha-dead_topk"]
    assert campaign.main([*ids, "--out", str(out), "--seconds", "900"]) == 0
    asked = [json.loads(file.read_text()) for file in sorted(recorder.iterdir())]
    assert {gpu for gpu, _ in asked} == {"4", "7"}
    assert len(asked) == len(ids), ONCE
    for _, words in asked:
        assert words[:3] == ["-m", "harness", "bench"]
        assert 890 <= float(words[words.index("--seconds") + 1]) <= 900
        assert "--resume" in words
    paths = {Path(words[words.index("--out") + 1]) for _, words in asked}
    assert paths == {out / f"{name}.jsonl" for name in ids}
    assert "said" in (out / "mha-fa3.txt").read_text()
    assert capsys.readouterr().err == ""


def test_a_row_that_cannot_be_measured_is_told_and_the_others_are(recorder, tmp_path, capsys):
    assert campaign.Campaign(
        rows=[COMPARISONS["phases"], COMPARISONS["mha-fa3"]],
        out=tmp_path,
        ends=time.monotonic() + 999,
    ).run(["0"]) == {"phases": 2, "mha-fa3": 0}
    gpus = [json.loads(f.read_text())[0] for f in sorted(recorder.iterdir())]
    assert gpus == ["0", "0"], ONCE


def test_a_row_that_cannot_be_measured_is_told_with_its_last_line(
    recorder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    words = ["phases", "mha-fa3", "--out", str(tmp_path / "records"), "--seconds", "900"]
    assert campaign.main(words) == 2
    assert capsys.readouterr().err == "specgate campaign: phases: said 3\n"


def test_a_row_whose_command_was_killed_is_told_and_the_others_are_measured(
    recorder, tmp_path, monkeypatch, capsys
):
    script = recorder.parent / "python"
    killed = "os.kill(os.getpid(), 9 if 'phases' in sys.argv[-4] else 0)"
    script.write_text(script.read_text().replace("time.sleep(0.2)", killed))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["phases", "mha-fa3", "--out", str(tmp_path / "records"), "--seconds", "900"]
    assert campaign.main(words) == 2, "a row whose command was killed was not measured"
    assert capsys.readouterr().err == "specgate campaign: phases: its command ended with -9\n"
    assert len([*recorder.iterdir()]) == 2, ONCE


def test_a_row_whose_verdict_is_red_was_measured(recorder, tmp_path, monkeypatch, capsys):
    script = recorder.parent / "python"
    script.write_text(script.read_text().replace("sys.exit(2 if", "sys.exit(1 if"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["phases", "mha-fa3", "--out", str(tmp_path / "records"), "--seconds", "900"]
    assert campaign.main(words) == 0
    assert capsys.readouterr().err == ""
    assert len([*recorder.iterdir()]) == 2, ONCE


def test_no_row_follows_one_that_was_interrupted(recorder, tmp_path):
    script = recorder.parent / "python"
    script.write_text(script.read_text().replace("sys.exit(2 if", "sys.exit(130 if"))
    rows = [COMPARISONS["phases"], COMPARISONS["mha-fa3"]]
    ends = time.monotonic() + 999
    codes = campaign.Campaign(rows=rows, out=tmp_path, ends=ends).run(["0"])
    assert codes == {"phases": 130}


def test_a_row_that_was_interrupted_is_no_failure(recorder, tmp_path, monkeypatch, capsys):
    script = recorder.parent / "python"
    script.write_text(script.read_text().replace("sys.exit(2 if", "sys.exit(130 if"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code = campaign.main(["phases", "--out", str(tmp_path / "records"), "--seconds", "900"])
    said = "the same command goes on with a row that was interrupted: it is no failure"
    assert (code, capsys.readouterr().err) == (0, ""), said


def test_the_next_row_has_the_time_that_the_one_before_left(recorder, tmp_path):
    script = recorder.parent / "python"
    script.write_text(script.read_text().replace("time.sleep(0.2)", "time.sleep(1)"))
    rows = [COMPARISONS["mha-fa3"], COMPARISONS["mla-kv_indices"]]
    ends = time.monotonic() + campaign.LEAST_S + 0.9
    codes = campaign.Campaign(rows=rows, out=tmp_path, ends=ends).run(["0"])
    said = "0.9 s more than a row needs are gone after one that took 1 s"
    assert codes == {"mha-fa3": 0}, said


def test_what_a_row_printed_before_it_went_on_is_kept(recorder, tmp_path):
    for _ in range(2):
        ends = time.monotonic() + 999
        campaign.Campaign(rows=[COMPARISONS["mha-fa3"]], out=tmp_path, ends=ends).run(["0"])
    printed = (tmp_path / "mha-fa3.txt").read_text().splitlines()
    assert printed == ["began", "said 0"] * 2, "each command's lines follow those before it"


def test_nothing_is_begun_that_has_no_time(recorder, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert campaign.main(["--out", str(tmp_path), "--seconds", "100"]) == 0
    assert not list(recorder.iterdir())


def test_a_dry_run_prints_commands(capsys, tmp_path):
    assert campaign.main(["phases", "--dry-run", "--out", str(tmp_path / "none")]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[1:4] == ["-m", "harness", "bench"]
    assert "--seconds" not in words
    assert not (tmp_path / "none").exists()


def test_bad_words_are_refused(capsys, monkeypatch, tmp_path):
    assert campaign.main(["mha-nothing"]) == 2
    assert "row = 'mha-nothing' is not accepted" in capsys.readouterr().err
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(campaign.nvml, "count", lambda: 0)
    with pytest.raises(UsageError, match="GPUs of this machine"):
        campaign.gpus()
    assert campaign.main(["--out", str(tmp_path)]) == 2
    assert "GPUs of this machine = 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shown", "found"), [(None, ["0", "1", "2"]), ("2", ["2"]), ("1,GPU-ab", ["1", "GPU-ab"])]
)
def test_gpus_are_those_that_are_shown(monkeypatch, shown, found):
    monkeypatch.setattr(campaign.nvml, "count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert campaign.gpus() == found


def test_an_empty_list_shows_no_gpu_of_a_machine_that_has_some(monkeypatch):
    monkeypatch.setattr(campaign.nvml, "count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="GPUs of this machine = 0"):
        campaign.gpus()


def test_effects_are_those_of_the_records(capsys):
    path = Path("docs/example/llama-3.1-8b/host-3-swapped.jsonl.gz")
    rows = list(campaign.effects(COMPARISONS["phases"], [path]))
    told = {(cells[1], cells[10]): cells for cells in rows}
    cells = told["bs1-in128-out193", "improved"]
    a, b, moved = map(float, cells[3:6])
    assert cells[6] == "-1.4 %"
    assert 6900 < b < a < 7300
    assert moved == pytest.approx(b - a, rel=0.2)


def test_a_folder_of_packed_records_is_shown_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(campaign, "gpus", lambda: pytest.fail("nothing is measured"))
    assert campaign.main(["--show", "--out", "docs/example/campaign"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    metadata = next(
        w for w in shown if w[:3] == ["mla-kv_indices", "bs1-in2048-out193-x4", "metadata"]
    )
    # Less blocks 0 and 8, where one arm's clock was capped: 71.5, 71.6, 69.2, 69.7, 71.7, 69.4,
    # 71.3, 71.8, 68.1 and 68.6.
    assert metadata[3] == "70.3"
    assert metadata[-3:] == ["improved", "NVIDIA", "H200"]


def test_steps_of_several_hosts_are_pooled():
    row, folder = COMPARISONS["phases"], Path("docs/example/campaign")
    paths = campaign.recorded(row, folder)
    assert [path.name for path in paths] == ["phases.jsonl.gz", "phases.h100-2.jsonl.gz"]
    *_, first, second = campaign.effects(row, paths)
    assert first[:3] == ("phases, pooled", "bs1-in128-out193", "step_time")
    assert second[1] == "bs8-in1024-out97"
    alone = [cells for path in paths for cells in campaign.effects(row, [path])]
    assert "phases, pooled" not in {cells[0] for cells in alone}
    for cells in (first, second):
        blocks = [c[9].split(",")[0] for c in alone if c[1:3] == cells[1:3]]
        assert int(cells[9]) == sum(map(int, blocks))
        changes = [float(c[6].split()[0]) for c in alone if c[1:3] == cells[1:3]]
        assert min(changes) - 0.05 <= float(cells[6].split()[0]) <= max(changes) + 0.05
        low, high = (float(word) for word in cells[7].removesuffix(" %").split(" to "))
        assert -0.1 <= low < high <= 0.5


def test_steps_of_one_kind_of_gpu_are_pooled():
    row = COMPARISONS["mha-fa3"]
    rows = list(campaign.effects(row, campaign.recorded(row, Path("docs/example/campaign"))))
    pools = [cells for cells in rows if cells[0] == "mha-fa3, pooled"]
    blocks = {"NVIDIA H200": [8, 4, 8, 8], "NVIDIA H100 80GB HBM3": [7, 7]}
    asked = {(kind, workload) for kind in blocks for workload in row.workloads}
    assert len(pools) == len(asked)
    assert {(cells[-1], cells[1]) for cells in pools} == asked
    for cells in pools:
        each = [c for c in rows if c[0] == "mha-fa3" and c[1:3] == cells[1:3]]
        own = [int(c[9].split(",")[0]) for c in each if c[-1] == cells[-1]]
        assert own == blocks[cells[-1]]
        assert int(cells[9]) == sum(own)


def packed(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    """Of the row phases: a plan, and the trials of its blocks."""
    text = gzip.decompress(Path("docs/example/campaign/phases.jsonl.gz").read_bytes())
    return [json.loads(line) for line in text.splitlines()]


def test_steps_of_other_arms_are_not_pooled(tmp_path, capsys, lines):
    packed(tmp_path, "phases", lines)
    plan = lines[0]
    for changed in (
        {"a": plan["a"] | {"name": "another"}},
        {"a": plan["a"] | {"versions": {"sglang": "0.5.13"}}},
        {"b": plan["b"] | {"name": "another"}},
        {"b": plan["b"] | {"versions": {"sglang": "0.5.13"}}},
        {"a": plan["b"], "b": plan["a"]},
    ):
        packed(tmp_path, "phases.other", [plan | changed, *lines[1:]])
        assert campaign.main(["--show", "phases", "--out", str(tmp_path)]) == 2
        assert "arms of phases = " in capsys.readouterr().err


def test_records_that_lie_there_packed_too_are_one_hosts(tmp_path, lines):
    for name in ("phases", "phases.h1", "phases.h2"):
        packed(tmp_path, name, lines)
        text = gzip.decompress((tmp_path / f"{name}.jsonl.gz").read_bytes())
        (tmp_path / f"{name}.jsonl").write_bytes(text)
    found = campaign.recorded(COMPARISONS["phases"], tmp_path)
    told = "a host counts once, packed, whose records lie there as they were, too"
    each = [f"phases{host}.jsonl.gz" for host in ("", ".h1", ".h2")]
    assert [path.name for path in found] == each, told


def test_nothing_is_pooled_where_no_block_is_valid(tmp_path, lines):
    broken = [line | {"invalid": ["broken"]} if "invalid" in line else line for line in lines]
    for name in ("phases", "phases.other"):
        packed(tmp_path, name, broken)
    row = COMPARISONS["phases"]
    rows = list(campaign.effects(row, campaign.recorded(row, tmp_path)))
    assert {cells[0] for cells in rows} == {"phases"}
