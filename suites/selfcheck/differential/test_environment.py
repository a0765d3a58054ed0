"""The environment says what the machine says, and nothing where it says nothing."""

from __future__ import annotations

import math
import platform
import subprocess
import sys

import pytest
import torch

from harness.core import environment as asked
from harness.core.tree import digest
from harness.errors import UsageError


def test_facts_of_this_machine():
    found = asked.environment()
    assert found.python == platform.python_version()
    assert found.torch == torch.__version__
    assert found.device == "cpu"
    assert found.processor
    assert found.cuda == found.driver == found.compute_capability == ""
    assert asked.kind_of("cpu") == "cpu"
    assert found.tree == digest()
    assert len(found.commit) in (0, 40)


def test_cuda_facts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(asked, "command", lambda *words: f"{words[0]} said\nmore")
    monkeypatch.setattr(asked, "version", lambda package: f"version of {package}")
    found = asked.environment.__wrapped__("cuda:1")
    assert (found.device, found.cuda) == ("name of cuda:1", "13.0")
    assert found.driver == "nvidia-smi said"
    assert (found.compute_capability, asked.kind_of("cuda:1")) == ("12.0", "sm120")
    assert found.flashinfer == "version of flashinfer-python"
    assert found.sgl_kernel == "version of sglang-kernel"
    assert found.triton == "version of triton"
    assert found.dirty


def test_a_device_is_one_of_those_that_are_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "cuda:1"):
        obtained = str(asked.present(name, "--device"))
        assert obtained == name, f"with two GPUs --device {name} is taken as it is: {obtained}"
    for name in ("cuda:2", "meta", "gpu"):
        told = ""
        try:
            asked.present(name, "--device")
        except UsageError as error:
            told = str(error)
        said = f"with two GPUs, cuda:0 and cuda:1, --device {name} is refused by name: {told!r}"
        assert told.startswith(f"--device = '{name}' is not accepted"), said


def test_what_is_unknown_is_empty(monkeypatch):
    assert asked.installed("no-such-package-here") == ""
    assert asked.installed("torch")
    monkeypatch.setattr(asked, "command", lambda *words: "")
    assert asked.driver() == ""
    found = asked.environment.__wrapped__("cpu")
    assert (found.commit, found.dirty) == ("", False)


def test_commands_that_are_absent_or_fail_say_nothing():
    assert asked.command("no-such-program-here") == ""
    assert asked.command(sys.executable, "-c", "print('said'); raise SystemExit(3)") == ""
    assert asked.command(sys.executable, "-c", "print('said')") == "said"


def test_a_command_that_hangs_says_nothing(monkeypatch):
    run, patience = subprocess.run, []

    def impatient(words, **options):
        patience.append(options.get("timeout", math.inf))
        return run(words, **options | {"timeout": 0.1})

    monkeypatch.setattr(subprocess, "run", impatient)
    told = "a command of the environment, as git or nvidia-smi, that hangs says nothing"
    try:
        obtained = asked.command(sys.executable, "-c", "import time; time.sleep(60)")
    except subprocess.TimeoutExpired:
        pytest.fail(f"{told}, and raises no TimeoutExpired")
    assert obtained == "", f"{told}: {obtained!r}"
    assert patience[0] <= 60, "a command that hangs keeps no trial waiting"


def test_processor_is_read_from_the_kernel(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert asked.processor(cpuinfo) == "Some CPU @ 2 GHz"
    cpuinfo.write_text("processor\t: 0\n")
    assert asked.processor(cpuinfo) == (platform.processor() or platform.machine())
    assert asked.processor(tmp_path / "none") == (platform.processor() or platform.machine())
