"""A run's records name the kind whose plan they belong to; a GPU of another kind is refused."""

from __future__ import annotations

import pytest
import torch

from fixtures.fakes import fake_gpu
from fixtures.pytest_plugin.kinds import checked
from harness.core.record import read_records
from harness.errors import UsageError

pytest_plugins = ["pytester"]

TESTS = """
from fixtures.fakes.sample_records import trial

def test_trial(record_trial):
    record_trial(trial("one"))
"""


@pytest.mark.parametrize(("args", "kind"), [((), "cpu"), (("--kind", "sm100"), "sm100")])
def test_records_name_the_kind(pytester: pytest.Pytester, args: tuple[str, ...], kind: str) -> None:
    names = [f"fixtures.pytest_plugin.{name}" for name in ("kinds", "resume", "shards", "records")]
    pytester.makeconftest(f"pytest_plugins = {names}")
    pytester.makepyfile(test_trials=TESTS)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--report", "out", *args)
    [record] = read_records(pytester.path / "out" / "records.jsonl")
    assert (record.kind, record.device) == (kind, "cpu")


@pytest.mark.parametrize("name", ["", "sm", "SM100", "10.0", "sm9", "gpu", "sm90a", "cpu0"])
def test_a_name_that_no_kind_has_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--kind = '{name}' is not accepted; accepted: cpu, or"):
        checked(name, "cpu")


def test_a_gpu_is_the_kind_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.pretend(monkeypatch)
    assert checked(None, "cuda:1") == checked("sm90", "cuda:1") == "sm90"
    with pytest.raises(UsageError, match="--kind = 'sm100' is not accepted; accepted: sm90, which"):
        checked("sm100", "cuda:1")
    with pytest.raises(UsageError, match="accepted: sm90, which cuda:1 is"):
        checked("cpu", "cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert checked(None, "cuda:0") == "sm103"
