"""Lengths are on the host only where a backend reads them; under overlap they are upper bounds."""

from __future__ import annotations

import pytest

from fixtures.toys.toy_engine import PROMPTS, toy_engine
from fixtures.toys.toy_rounds import WIDTH, run, standings

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
