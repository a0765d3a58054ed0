"""Workers are as many as the GPUs bear, and each has one by turns."""

from __future__ import annotations

import pytest
import torch

from fixtures.fakes.fake_gpu import pretend

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


@pytest.mark.parametrize(
    ("device", "workers", "count"),
    [("cuda", 1, 2), ("auto", 3, 6), ("cuda:1", 3, 3), ("cpu", 3, None)],
)
def test_workers_are_as_many_as_gpus_bear(
    pytester: pytest.Pytester,
    device: str,
    workers: int,
    count: int | None,
) -> None:
    args = (
        "-p",
        "fixtures.pytest_plugin.plugin",
        "--device",
        device,
        "--workers-per-gpu",
        str(workers),
    )
    config = pytester.parseconfig(*args)
    plugin = config.pluginmanager.get_plugin("fixtures.pytest_plugin.plugin")
    assert plugin is not None
    assert plugin.pytest_xdist_auto_num_workers(config) == count


@pytest.mark.parametrize(
    ("device", "worker", "told"),
    [
        ("cuda", "gw0", "cuda:0"),
        ("cuda", "gw3", "cuda:1"),
        ("cuda", "gw4", "cuda:0"),
        ("cuda:1", "gw4", "cuda:1"),
    ],
)
def test_workers_take_turns_over_the_gpus(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    worker: str,
    told: str,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    config = pytester.parseconfig("-p", "fixtures.pytest_plugin.plugin", "-n0", "--device", device)
    config.workerinput = {"workerid": worker}  # type: ignore[attr-defined]
    plugin = config.pluginmanager.get_plugin("fixtures.pytest_plugin.plugin")
    assert plugin is not None
    plugin.pytest_configure(config)
    assert chosen == [told] == [config.getoption("--device")]


def test_controller_leaves_the_gpus_to_its_workers(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    config = pytester.parseconfig("-p", "fixtures.pytest_plugin.plugin", "-n2", "--device", "cuda")
    plugin = config.pluginmanager.get_plugin("fixtures.pytest_plugin.plugin")
    assert plugin is not None
    plugin.pytest_configure(config)
    assert chosen == []
    assert config.getoption("--device") == "cuda"
