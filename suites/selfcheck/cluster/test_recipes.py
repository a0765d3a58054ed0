"""Recipes ask for kinds as this project names them, and start what there is."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ci.cluster.__main__ import is_kind, parser
from ci.cluster.machine import HOST
from harness.core.paths import ROOT

RECIPES = ROOT / "ci" / "cluster" / "recipes"
KUBERAY: dict[str, Any] = yaml.safe_load((RECIPES / "kuberay.yaml").read_text(encoding="utf-8"))
ACTIONS: dict[str, Any] = yaml.safe_load((RECIPES / "actions.yml").read_text(encoding="utf-8"))
SCRIPTS = ("hosts.sh", "slurm.sbatch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(RECIPES / name)], check=True)


@pytest.mark.parametrize("name", [*SCRIPTS, "kuberay.yaml"])
def test_options_are_those_of_the_command(name: str) -> None:
    text = (RECIPES / name).read_text(encoding="utf-8")
    [words] = re.findall(r"python -m ci\.cluster (--.*)", text)
    known = {option for action in parser()._actions for option in action.option_strings}
    assert set(re.findall(r"(?<!\S)--[a-z-]+", words)) <= known


def test_hosts_without_hosts_or_a_command_are_refused() -> None:
    for words in ([], ["/srv"], ["/srv", "--"], ["/srv", "host"]):
        done = subprocess.run(
            ["bash", str(RECIPES / "hosts.sh"), *words], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "usage: hosts.sh FOLDER HOST... -- ARGS" in done.stderr


def test_every_group_of_kuberay_declares_its_gpus_as_its_kind() -> None:
    groups = KUBERAY["spec"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["sm90", "sm100"]
    for group in groups:
        declared = json.loads(json.loads(group["rayStartParams"]["resources"]))
        [container] = group["template"]["spec"]["containers"]
        gpus = float(container["resources"]["limits"]["nvidia.com/gpu"])
        assert declared == {group["groupName"]: gpus, HOST: 1}
        assert is_kind(group["groupName"])
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert KUBERAY["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_kuberay_runs_the_pinned_ray() -> None:
    pinned = (ROOT / "ci" / "constraints.txt").read_text(encoding="utf-8")
    assert f"ray=={KUBERAY['spec']['rayVersion']}\n" in pinned


def test_actions_gate_every_kind_that_ran() -> None:
    kinds = [one["kind"] for one in ACTIONS["jobs"]["kind"]["strategy"]["matrix"]["include"]]
    gate = ACTIONS["jobs"]["verdict"]["steps"][-1]["run"]
    assert gate.endswith(f"--kinds {','.join(kinds)}")
    assert all(map(is_kind, kinds))


def test_no_recipe_names_a_path_of_a_machine() -> None:
    for path in RECIPES.iterdir():
        assert str(Path.home()) not in path.read_text(encoding="utf-8")
