"""Lengths are on the host only where a backend reads them; under overlap they are upper bounds."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fixtures.toys.toy_backend import DenseBackend
from fixtures.toys.toy_engine import PROMPTS, eagle_phases, kv_pool, spec_config, toy_engine
from fixtures.toys.toy_rounds import WIDTH, run, standings
from harness.engine.eagle_worker import EagleWorker
from harness.engine.phases import EaglePhases
from harness.upstream.allocator import ReqToTokenPool

BOTH = pytest.mark.parametrize("version", [1, 2], ids=["draft_extend_v1", "draft_extend_v2"])


@BOTH
def test_hosts_know_no_lengths_where_nobody_reads_them(version: int) -> None:
    toy, _ = run(version)
    assert all(f.batch.seq_lens_cpu is f.batch.seq_lens_sum is None for f in toy.trace)


@BOTH
def test_host_lengths_are_the_devices_where_somebody_reads_them(version: int) -> None:
    toy, _ = run(version, needs_cpu=True)
    for forward in toy.trace:
        assert forward.batch.seq_lens_cpu is not None
        assert forward.batch.seq_lens_cpu.tolist() == forward.batch.seq_lens.tolist()
        told = "seq_lens_sum is the sum of seq_lens"
        assert forward.batch.seq_lens_sum == int(forward.batch.seq_lens.sum()), told


@pytest.mark.parametrize("phase", [each.name for each in fields(EaglePhases)])
def test_one_phase_whose_backend_reads_lengths_is_enough(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, pool = spec_config(3, 3), kv_pool(8, 4)
    phases = eagle_phases(spec, DenseBackend(), needs_cpu=False)
    monkeypatch.setattr(getattr(phases, phase).backend, "needs_cpu_seq_lens", True)
    worker = EagleWorker(phases, spec, ReqToTokenPool(1, 16), pool, pool)
    # The others do not mind: the toy's refuse lengths that they did not ask for.
    for backend in phases.backends():
        monkeypatch.setattr(backend, "step", 0, raising=False)
    told = f"the host knows lengths, which the backend of {phase} reads there"
    assert worker.prefill([], [], []).seq_lens_cpu is not None, told


def test_host_lengths_of_target_only_decoding_are_the_devices() -> None:
    toy = toy_engine(needs_cpu=True)
    toy.engine.generate(PROMPTS[:3], 5)
    decodes = toy.trace.of("decode")
    assert len(decodes) == 4, "of max_new_tokens = 5 the prefill emits one and decodes four"
    for number, batch in enumerate(decodes, start=1):
        told = "seq_lens grow by one with every token that is decoded"
        assert batch.seq_lens.tolist() == [len(p) + number for p in PROMPTS[:3]], told
        assert batch.seq_lens_cpu is not None
        assert batch.seq_lens_cpu.tolist() == batch.seq_lens.tolist()


def test_host_lengths_run_ahead_under_overlap() -> None:
    toy, requests = run(2, overlap=True, needs_cpu=True)
    for number, forward in enumerate(toy.trace.of("target_verify")):
        lengths = (
            [s.accepted for s in standings(toy, requests, number - 1)] if number else [WIDTH] * 3
        )
        ahead = [WIDTH - n for n in lengths]
        host, device = forward.seq_lens_cpu, forward.seq_lens
        assert host is not None
        assert (host - device).tolist() == ahead
        told = "seq_lens_sum is that of the host's upper bounds, which waits for no device"
        assert forward.seq_lens_sum == sum(host.tolist()), told
