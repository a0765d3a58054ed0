"""The pipeline is one that GitHub understands, and calls tox, and git for the history of nights."""

from __future__ import annotations

import configparser
import shlex

import yaml

from ci.nightly import checks
from harness.core.paths import ROOT

PIPELINE = yaml.safe_load((ROOT / "ci" / "pipeline.yml").read_text(encoding="utf-8"))
STEPS = [step for job in PIPELINE["jobs"].values() for step in job["steps"]]
BRANCH = "nights-${{ matrix.gpu }}"


def test_pipeline_has_what_github_needs() -> None:
    assert set(PIPELINE) == {"name", True, "permissions", "env", "defaults", "jobs"}
    assert set(PIPELINE[True]) == {"push", "pull_request", "schedule", "workflow_dispatch"}
    [entry] = PIPELINE[True]["schedule"]
    assert len(entry["cron"].split()) == 5
    for job in PIPELINE["jobs"].values():
        assert {"runs-on", "steps", "timeout-minutes"} <= set(job)
    assert all(("uses" in step) != ("run" in step) for step in STEPS)
    assert all("@v" in step["uses"] for step in STEPS if "uses" in step)


def test_pipeline_calls_tox_and_git_for_the_history_alone() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    lanes = PIPELINE["jobs"]["check"]["strategy"]["matrix"]["lane"]
    commands = [step["run"] for step in STEPS if "run" in step]
    assert [c.split()[:3] for c in commands if c.startswith("git ")] == [
        ["git", "fetch", "origin"],
        ["git", "push", "origin"],
    ]
    commands = [c.replace(BRANCH, "BRANCH") for c in commands if not c.startswith("git ")]
    ran = [shlex.split(c.replace("${{ matrix.lane }}", lane)) for c in commands for lane in lanes]
    assert {words[0] for words in ran} == {"$TOX"}
    assert {words[1] for words in ran} == {"-e"}
    assert all(f"testenv:{words[2]}" in tox for words in ran)
    assert {tuple(words[3:]) for words in ran} == {
        (),
        ("--", "--dry-run"),
        ("--", "--history-branch", "BRANCH"),
    }
    pins = dict(checks.pinned("constraints.txt"))
    assert PIPELINE["env"]["TOX"] == f"pipx run tox=={pins['tox']} run"


def test_a_night_fetches_its_branch_before_and_pushes_it_after_even_a_red_one() -> None:
    job = PIPELINE["jobs"]["nightly"]
    assert job["permissions"] == {"contents": "write"}
    fetch, night, push = [step for step in job["steps"] if "run" in step]
    source, _, target = shlex.split(fetch["run"])[3].partition(":")
    assert source == target == "refs/heads/nights-*"
    assert night["run"].endswith(f" --history-branch {BRANCH}")
    assert push["run"].endswith(f" refs/heads/{BRANCH}")
    assert push["if"] == "always()"


def test_a_matrix_without_values_is_never_asked_for() -> None:
    text = (ROOT / "ci" / "pipeline.yml").read_text(encoding="utf-8")
    for name, job in PIPELINE["jobs"].items():
        matrix = job.get("strategy", {}).get("matrix", {})
        asked = {word.split("}")[0].strip() for word in str(job).split("matrix.")[1:]}
        axes = set(matrix) - {"include"}
        assert {word.partition(" ")[0] for word in asked} == axes, name
        assert all(set(row) == axes for row in matrix.get("include", ())), name
    assert "\t" not in text


def test_the_newest_release_is_on_trial_at_every_push_and_every_release_each_night() -> None:
    jobs = PIPELINE["jobs"]
    assert "upstream" in jobs["check"]["strategy"]["matrix"]["lane"]
    nightly = [job for job in jobs.values() if "event_name == 'schedule'" in job.get("if", "")]
    ran = [step.get("run", "") for job in nightly for step in job["steps"]]
    assert any(command.endswith("-e upstream-all") for command in ran)
