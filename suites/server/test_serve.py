"""``specgate serve`` refuses bad options and broken pairs in one line, and ends."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from harness.core.paths import MODELS
from harness.engines import EngineConfig
from harness.errors import UsageError
from harness.server import __main__ as command
from harness.server.engine_process import build, entry
from harness.server.engine_process.messages import EngineOptions
from harness.server.launch.process import ROOT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--page-size", "0"), "argument --page-size: '0' is not accepted; accepted: 1 or more"),
        (("--num-steps", "-1"), "argument --num-steps: '-1' is not accepted"),
        (("--context-length", "many"), "argument --context-length: 'many' is not accepted"),
        (("--pair", "llama"), "--pair = 'llama' is not accepted; accepted: gqa, mla"),
        (("--slowdown", "11"), "--slowdown = 11.0 is not accepted; accepted: 0 … 10"),
        (("--spec", "v3"), "invalid choice: 'v3'"),
        (("--host", ""), "--host = '' is not accepted; accepted: an IPv4 address"),
        # 512 tokens and 4 drafts are 33 pages of 16.
        (("--num-pages", "33"), "--num-pages = 33 is not accepted; accepted: at least 34"),
        # And with 20 steps of the draft, which write 20 slots ahead, 34.
        (("--num-pages", "34", "--num-steps", "20"), "--num-pages = 34 is not accepted"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_named_before_anything_starts(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    starts = f"{' '.join(words)} must be refused by {message!r}, and a server has started"
    monkeypatch.setattr(command, "_serve", lambda *_: pytest.fail(starts))
    with pytest.raises(SystemExit) as ended:
        command.main(["--pair", "gqa", *words])
    assert ended.value.code == 2, f"a mistake ends with status 2, not {ended.value.code}"
    said = capsys.readouterr().err
    assert message in said, f"a mistake is named on stderr by {message!r}, not {said!r}"


@pytest.mark.parametrize(
    "words",
    [
        ("--slowdown", "10"),
        ("--slowdown", "0"),
        ("--num-pages", "34"),
        ("--context-length", "4096"),
    ],
    ids=" ".join,
)
def test_what_stands_at_a_bound_is_accepted(words: tuple[str, ...]) -> None:
    command._check(command.parser().parse_args(["--pair", "gqa", *words]))


OPTIONS = EngineOptions(
    models=MODELS,
    pair="gqa",
    spec="v2",
    kernel="reference",
    device="cpu",
    num_steps=3,
    num_draft_tokens=4,
    page_size=16,
    num_pages=40,
    max_running_requests=2,
    context_length=64,
    slowdown=0.0,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "fa9"}, "kernel = 'fa9' is not accepted; accepted: reference, "),
        ({"device": "tpu9"}, "device = 'tpu9' is not accepted; accepted: cpu, cuda"),
        ({"device": "cuda:99"}, "device = 'cuda:99' is not accepted; accepted: cpu; "),
        ({"num_draft_tokens": 1}, "num_draft_tokens = 1"),
    ],
    ids=["kernel", "device", "no_such_gpu", "drafts"],
)
def test_an_engine_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        build.build(replace(OPTIONS, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("most", "captured"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (9, (1, 2, 4, 8, 9))]
)
def test_graphs_are_captured_up_to_the_most_requests_that_run(
    most: int, captured: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []

    class Builder:
        def __init__(self, *given: Any) -> None:
            configs.append(given[-1])

        def scheduler(self, *, prefix_cache: bool) -> None:
            assert prefix_cache

    monkeypatch.setattr(build, "EngineBuilder", Builder)
    build.build(replace(OPTIONS, max_running_requests=most))
    said = f"a batch of all {most} requests is replayed from a graph, too"
    assert [config.capture_bs for config in configs] == [captured], said


def test_an_engine_that_cannot_start_ends_the_server() -> None:
    words = ("serve", "--pair", "gqa", "--num-steps", "3", "--num-draft-tokens", "1")
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "specgate serve: " in done.stderr
    assert "num_draft_tokens = 1" in done.stderr
    assert "Traceback" not in done.stderr


def _without(name: str) -> Callable[[Path], None]:
    return lambda target: (target / name).unlink()


def _no_json(name: str) -> Callable[[Path], None]:
    return lambda target: (target / name).write_text("[") and None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("tokenizer.json"), "tokenizer.json does not exist"),
        (_no_json("tokenizer.json"), "tokenizer.json is no tokenizer: "),
        (_no_json("config.json"), "config.json is not accepted; accepted: a JSON object with"),
    ],
    ids=["no_tokenizer", "bad_tokenizer", "bad_config"],
)
def test_a_broken_pair_is_named_in_one_line(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    shutil.copytree(MODELS / "gqa", tmp_path / "gqa")
    damage(tmp_path / "gqa" / "target")
    command = [sys.executable, "-m", "harness", "serve", "--pair", "gqa", "--models", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("specgate serve: ")]
    assert message in line


def test_what_an_engine_of_a_pair_lacks_is_named_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MODELS / "gqa", tmp_path / "gqa")
    _without("generation_config.json")(tmp_path / "gqa" / "target")
    fork = get_context("fork")  # of this process, which has imported torch
    _, theirs = fork.Pipe()
    engine = fork.Process(target=entry.run, args=(theirs, replace(OPTIONS, models=tmp_path)))
    engine.start()
    engine.join(60)
    told = capfd.readouterr().err
    assert engine.exitcode == 2, told
    [line] = told.splitlines()
    assert line.startswith("specgate serve: ")
    assert line.endswith("generation_config.json does not exist")


def test_a_kernel_for_other_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compute_capability", lambda _: (7, 5))
    options = replace(OPTIONS, kernel="xqa")
    with pytest.raises(UsageError, match="kernel = 'xqa': xqa needs compute capability"):
        build.build(options)
