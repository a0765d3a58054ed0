"""Probes name the keys that were read, exactly, at every length and dtype."""

from __future__ import annotations

import pytest
import torch

from harness.differential.key_tracers import LOUD, KeyTracer, point, read_point, read_watch, watch
from harness.errors import UsageError
from harness.oracle import attend, low_precision_attend, quantize

SHAPE = {"heads": 6, "kv_heads": 2, "dim": 16, "v_dim": 16}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def serve(probe: KeyTracer, dtype: torch.dtype, *, prefix_len: int, scale: float = 0.25, **given):
    """A plain implementation at a dtype, or over an FP8 cache."""
    if dtype == torch.float8_e4m3fn:
        k, v, dtype = quantize(probe.k, 1.0), quantize(probe.v, 1.0), torch.bfloat16
        assert torch.equal(v.float(), probe.v)
    else:
        k, v = probe.k, probe.v
    given |= {"prefix_len": prefix_len, "scale": scale}
    return low_precision_attend(probe.q, k, v, dtype=dtype, **given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("total", [7, 64, 4096, 32768])
@pytest.mark.parametrize("latent", [False, True], ids=["values", "latent"])
def test_watch_shows_the_causal_edge_of_every_query(dtype, total, latent):
    traced = [0, 1, *range(total - 5, total)]
    shape = SHAPE | ({"kv_heads": 1} if latent else {})
    probe = watch(traced, total=total, q_len=3, latent=latent, **shape)
    out = serve(probe, dtype, prefix_len=total - 3)
    for j in range(3):
        reading = read_watch(out[j], traced, shape["kv_heads"])
        assert reading.positions == tuple(sorted(p for p in set(traced) if p <= total - 3 + j))
        assert reading.keys == pytest.approx(total - 2 + j, rel=2.0**-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_watch_shows_one_key_of_32768(dtype):
    total, traced = 32768, [0, 1, 32766, 32767]
    probe = watch(traced, total=total, q_len=1, **SHAPE)
    shapes = {
        "first dropped": (probe.k[1:], probe.v[1:], (1, 32766, 32767)),
        "last missing": (probe.k[:-1], probe.v[:-1], (0, 1, 32766)),
    }
    for k, v, expected in shapes.values():
        out = serve(KeyTracer(q=probe.q, k=k, v=v), dtype, prefix_len=total - 2)
        assert read_watch(out[0], traced, 2).positions == expected


def test_watch_counts_by_hand():
    traced = list(range(4, 12))
    probe = watch(traced, total=12, q_len=1, **SHAPE)
    row = attend(probe.q, probe.k, probe.v, prefix_len=11, scale=1.0, window_left=4)[0]
    reading = read_watch(row, traced, 2)
    assert str(reading) == "read 5 keys, among them positions [7, 8, 9, 10, 11]"
    assert row.max() == LOUD / 5
    nothing = read_watch(torch.zeros(6, 16), traced, 2)
    assert (nothing.keys, nothing.positions) == (0.0, ())


def test_watch_uses_the_columns_of_every_kv_head():
    traced = list(range(32))
    probe = watch(traced, total=40, q_len=1, **SHAPE)
    out = attend(probe.q, probe.k, probe.v, prefix_len=39, scale=1.0)
    assert read_watch(out[0], traced, 2).positions == tuple(range(32))
    assert (out[0, :3] != out[0, 3:]).sum() == 0
    with pytest.raises(UsageError, match="positions = 33 is not accepted; accepted: at most 32"):
        watch(range(33), total=40, q_len=1, **SHAPE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("total", [1, 2, 64, 32768])
@pytest.mark.parametrize("latent", [False, True], ids=["values", "latent"])
@pytest.mark.parametrize("scale", [0.25, 192**-0.5])
def test_point_reads_exactly_the_targets(dtype, total, latent, scale):
    targets = [[h * (total - 1) // 5 for h in range(6)], [0, total - 1, 0, 0, total // 2, 0]]
    total += 1
    shape = {"kv_heads": 1 if latent else 2, "dim": 24, "v_dim": 16}
    probe = point(targets, total=total, scale=scale, latent=latent, **shape)
    out = serve(probe, dtype, prefix_len=total - 2, scale=scale)
    assert [read_point(row, total) for row in out] == [tuple(row) for row in targets]


def test_point_names_the_page_that_lies_there_instead():
    probe = point([[5, 21, 40, 5, 21, 40]], total=64, kv_heads=2, dim=16, v_dim=16, scale=0.25)
    swapped = torch.arange(64).view(4, 16)[[0, 2, 1, 3]].flatten()
    # Values come from swapped pages, keys do not: a kernel that mixes two block tables.
    mixed = KeyTracer(q=probe.q, k=probe.k, v=probe.v[swapped])
    out = serve(mixed, torch.bfloat16, prefix_len=63)
    assert read_point(out[0], 64) == (5, 37, 24, 5, 37, 24)


def test_point_at_a_missing_key_reads_no_position():
    probe = point([[63] * 6], total=64, kv_heads=2, dim=16, v_dim=16, scale=0.25)
    out = serve(KeyTracer(q=probe.q, k=probe.k[:63], v=probe.v[:63]), torch.bfloat16, prefix_len=62)
    assert read_point(out[0], 64) == (None,) * 6


def test_point_needs_room_for_its_code():
    with pytest.raises(UsageError, match="total = 300 is not accepted; accepted: at most 256"):
        point([[0]], total=300, kv_heads=1, dim=16, v_dim=8, scale=1.0)
