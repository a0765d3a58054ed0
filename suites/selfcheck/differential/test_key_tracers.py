"""Tracers name the keys that were read, exactly, at every length and dtype."""

from __future__ import annotations

import pytest
import torch

from harness.differential.key_tracers import TRACER_VALUE, KeyTracer, make_tracer, read_tracer
from harness.errors import UsageError
from harness.oracle import attend, low_precision_attend, quantize

SHAPE = {"heads": 6, "kv_heads": 2, "dim": 16, "v_dim": 16}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def serve(tracer: KeyTracer, dtype: torch.dtype, *, prefix_len: int, scale: float = 0.25, **given):
    """A plain implementation at a dtype, or over an FP8 cache."""
    if dtype == torch.float8_e4m3fn:
        k, v, dtype = quantize(tracer.k, 1.0), quantize(tracer.v, 1.0), torch.bfloat16
        assert torch.equal(v.float(), tracer.v)
    else:
        k, v = tracer.k, tracer.v
    given |= {"prefix_len": prefix_len, "scale": scale}
    return low_precision_attend(tracer.q, k, v, dtype=dtype, **given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("total", [7, 64, 4096, 32768])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_tracer_shows_the_causal_edge_of_every_query(dtype, total, kv_heads):
    traced = [0, 1, *range(total - 5, total)]
    tracer = make_tracer(traced, total=total, q_len=3, **SHAPE | {"kv_heads": kv_heads})
    out = serve(tracer, dtype, prefix_len=total - 3)
    for j in range(3):
        reading = read_tracer(out[j], traced, kv_heads)
        assert reading.positions == tuple(sorted(p for p in set(traced) if p <= total - 3 + j))
        assert reading.keys == pytest.approx(total - 2 + j, rel=2.0**-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tracer_shows_one_key_of_32768(dtype):
    total, traced = 32768, [0, 1, 32766, 32767]
    tracer = make_tracer(traced, total=total, q_len=1, **SHAPE)
    shapes = {
        "first dropped": (tracer.k[1:], tracer.v[1:], (1, 32766, 32767)),
        "last missing": (tracer.k[:-1], tracer.v[:-1], (0, 1, 32766)),
    }
    for k, v, expected in shapes.values():
        out = serve(KeyTracer(q=tracer.q, k=k, v=v), dtype, prefix_len=total - 2)
        assert read_tracer(out[0], traced, 2).positions == expected


def test_a_tracer_counts_by_hand():
    traced = list(range(4, 12))
    tracer = make_tracer(traced, total=12, q_len=1, **SHAPE)
    row = attend(tracer.q, tracer.k, tracer.v, prefix_len=11, scale=1.0, window_left=4)[0]
    reading = read_tracer(row, traced, 2)
    assert str(reading) == "read 5 keys, among them positions [7, 8, 9, 10, 11]"
    assert row.max() == TRACER_VALUE / 5
    nothing = read_tracer(torch.zeros(6, 16), traced, 2)
    assert (nothing.keys, nothing.positions) == (0.0, ())


@pytest.mark.parametrize("head", [3, 4, 5])
def test_a_position_is_read_that_one_head_of_a_group_read(head):
    # The second KV head's: its third column is that of position 18.
    row = torch.zeros(6, 16)
    row[head, 2] = TRACER_VALUE / 7
    reading = read_tracer(row, range(32), 2)
    said = "a position is read that any query head of a KV head's group read"
    assert (reading.positions, reading.keys) == ((18,), pytest.approx(7)), said


def test_a_tracer_uses_the_columns_of_every_kv_head():
    traced = list(range(32))
    tracer = make_tracer(traced, total=40, q_len=1, **SHAPE)
    out = attend(tracer.q, tracer.k, tracer.v, prefix_len=39, scale=1.0)
    assert read_tracer(out[0], traced, 2).positions == tuple(range(32))
    assert (out[0, :3] != out[0, 3:]).sum() == 0
    with pytest.raises(UsageError, match="positions = 33 is not accepted; accepted: at most 32"):
        make_tracer(range(33), total=40, q_len=1, **SHAPE)
