"""Metrics of a trial: one number per metric, from its passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from harness.bench.load_generator import WorkloadRun
from harness.bench.session_records import Sample
from harness.bench.stats.margin import PART

Phases = Mapping[str, tuple[float, int]]
"""Microseconds and counts by phase, since a server was started."""
STEP = "verify"
"""The phase that every step has once."""


def decode_ms(sample: Sample) -> float:
    """From the first chunk to the last."""
    return sample.latency_ms - sample.ttft_ms


def tpot_ms(sample: Sample) -> float:
    """Time per output token after the first."""
    return decode_ms(sample) / (sample.completion_tokens - 1)


def percentile_99(values: Sequence[float]) -> float:
    """The smallest value that 99 % of all do not exceed."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def metrics(passes: Sequence[WorkloadRun]) -> dict[str, float]:
    """Numbers of a trial by the name of their margin; none of passes in which a request failed.

    TPOT, TTFT and step time are medians over requests, the throughput is tokens of all passes over
    their time, and the accept length is pooled as sglang counts it: completion tokens over verify
    steps. Without speculation there are neither steps nor an accept length. A request whose tokens
    came all at once has no TPOT.
    """
    samples = [sample for one in passes for sample in one.samples]
    if not samples or any(one.failures for one in passes):
        return {}
    gaps = [gap for sample in samples for gap in sample.chunk_gaps_ms]
    tokens = sum(map(_tokens, passes))
    steps = [_steps(one) for one in passes]
    tpots = [tpot_ms(sample) for sample in samples if decode_ms(sample)]
    ttfts = [sample.ttft_ms for sample in samples]
    found = {
        "ttft": median(ttfts),
        "output_throughput": tokens / sum(one.seconds for one in passes),
        "ttft_p99": percentile_99(ttfts),
    }
    if tpots:
        found |= {"tpot": median(tpots), "tpot_p99": percentile_99(tpots)}
    if gaps:
        found["itl"] = median(gaps)
    if all(sample.spec_verify_ct for sample in samples):
        found["step_time"] = median(decode_ms(s) / s.spec_verify_ct for s in samples)
    if all(steps):
        found["accept_length"] = tokens / sum(steps)
    return found


def phase_metrics(before: Phases, after: Phases) -> dict[str, float]:
    """Microseconds of a step by phase, between two readings; none of a phase that took no time."""
    spent = {name: after[name][0] - before.get(name, (0.0, 0))[0] for name in after}
    steps = after.get(STEP, (0.0, 0))[1] - before.get(STEP, (0.0, 0))[1]
    return {PART + name: us / steps for name, us in spent.items() if steps and us}


def step_ms(found: Mapping[str, float]) -> float:
    """Milliseconds per step from a trial's numbers, about; 0 where they do not tell."""
    return found.get("step_time") or found.get("tpot", 0.0) * found.get("accept_length", 1.0)


def _tokens(one: WorkloadRun) -> int:
    return sum(sample.completion_tokens for sample in one.samples)


def _steps(one: WorkloadRun) -> float:
    """Verify steps, 0 where neither the samples nor the server tell them."""
    if one.accept_length:
        return _tokens(one) / one.accept_length
    return sum(sample.spec_verify_ct for sample in one.samples)
