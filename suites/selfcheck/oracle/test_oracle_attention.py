"""The oracle's attention is the textbook's, whatever the length, window, sinks or grouping."""

from __future__ import annotations

import math

import pytest
import torch

from harness import oracle
from harness.oracle import attention


def textbook(q, k, v, prefix_len, scale, window_left=-1, sinks=None):
    """One number at a time."""
    n, heads, _ = q.shape
    out = torch.zeros(n, heads, v.shape[2], dtype=torch.float64)
    for j in range(n):
        for h in range(heads):
            group = h * k.shape[1] // heads
            first = 0 if window_left < 0 else max(0, prefix_len + j - window_left)
            keys = range(first, prefix_len + j + 1)
            scores = [float(q[j, h].double() @ k[t, group].double()) * scale for t in keys]
            weights = [math.exp(s) for s in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[h])))
            for weight, t in zip(weights, keys, strict=True):
                out[j, h] += weight / total * v[t, group].double()
    return out


def drawn(n, prefix_len, heads=6, kv_heads=2, dim=8, v_dim=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, heads, dim), (prefix_len + n, kv_heads, dim), (prefix_len + n, kv_heads, v_dim))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("block", [attention.MAX_SCORES, 6 * 12 * 2], ids=["whole", "blocks"])
@pytest.mark.parametrize("window_left", [-1, 0, 3, 100])
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("prefix_len", [0, 7])
def test_attend_is_the_textbook(monkeypatch, block, window_left, sink, prefix_len):
    monkeypatch.setattr(attention, "MAX_SCORES", block)
    q, k, v = drawn(5, prefix_len)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 9.0, 1.5]) if sink else None
    given = {"prefix_len": prefix_len, "scale": 0.3, "window_left": window_left, "sinks": sinks}
    torch.testing.assert_close(
        oracle.attend(q, k, v, **given), textbook(q, k, v, **given), rtol=1e-12, atol=1e-13
    )


def test_two_tokens_by_hand():
    q = torch.ones(2, 1, 1)
    k = torch.tensor([0.0, math.log(3.0)]).view(2, 1, 1)
    v = torch.tensor([4.0, 8.0]).view(2, 1, 1)
    out = oracle.attend(q, k, v, prefix_len=0, scale=1.0).flatten().tolist()
    assert out == pytest.approx([4.0, 0.25 * 4 + 0.75 * 8])
    sunk = oracle.attend(q, k, v, prefix_len=0, scale=1.0, sinks=torch.tensor([math.log(4.0)]))
    assert sunk.flatten().tolist() == pytest.approx([4 / 5, (4 + 24) / 8])


def test_huge_scores_do_not_overflow():
    q, k, v = drawn(3, 4)
    out = oracle.attend(q * 1e4, k * 1e4, v, prefix_len=4, scale=1.0)
    assert out.isfinite().all()


def test_latent_attention_is_one_kv_head_whose_value_is_a_slice():
    q, latent, _ = drawn(2, 9, heads=4, kv_heads=1, dim=24)
    out = oracle.attend(q, latent, latent[..., :16], prefix_len=9, scale=0.2)
    expected = textbook(q, latent, latent[..., :16], 9, 0.2)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_no_query_no_row():
    q, k, v = drawn(0, 4)
    assert oracle.attend(q, k, v, prefix_len=4, scale=1.0).shape == (0, 6, 5)


@pytest.mark.parametrize(
    ("prefix_len", "change"),
    [
        pytest.param(3, {}, id="prefix-too-short"),
        pytest.param(5, {}, id="prefix-too-long"),
        pytest.param(4, {"k": (6, 2, 7)}, id="key-dim"),
        pytest.param(4, {"v": (6, 1, 5)}, id="value-heads"),
        pytest.param(4, {"v": (7, 2, 5)}, id="more-values-than-keys"),
        pytest.param(4, {"k": (7, 2, 8)}, id="more-keys-than-values"),
        pytest.param(4, {"k": (6, 4, 8), "v": (6, 4, 5)}, id="no-whole-group"),
    ],
)
def test_shapes_of_another_request_are_refused(prefix_len, change):
    given = dict(zip("qkv", drawn(2, 4), strict=True))
    given |= {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match="do not describe"):
        oracle.attend(*given.values(), prefix_len=prefix_len, scale=1.0)
    with pytest.raises(ValueError, match="do not describe"):
        oracle.low_precision_attend(
            *given.values(), prefix_len=prefix_len, scale=1.0, dtype=torch.bfloat16
        )


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [(torch.bfloat16, 5e-4, 5e-3), (torch.float16, 5e-5, 6e-4), (torch.float32, 1e-9, 1e-6)],
)
def test_low_precision_has_the_error_of_its_dtype(dtype, least, most):
    q, k, v = (t.to(dtype) for t in drawn(4, 60, dim=64, v_dim=64))
    given = {"prefix_len": 60, "scale": 0.125, "window_left": 40, "sinks": torch.ones(6)}
    plain = oracle.low_precision_attend(q, k, v, dtype=dtype, **given)
    assert plain.dtype == dtype
    exact = oracle.attend(q, k, v, **given)
    assert least < float((plain.double() - exact).norm() / exact.norm()) < most


def test_low_precision_reads_fp8_as_stored():
    q, k, v = drawn(4, 60, dim=64, v_dim=64)
    q = q.bfloat16()
    stored = {"k": oracle.quantize(k, 0.7), "v": oracle.quantize(v, 1.3)}
    given = {"prefix_len": 60, "scale": 0.125}
    plain = oracle.low_precision_attend(
        q, *stored.values(), dtype=torch.bfloat16, k_scale=0.7, v_scale=1.3, **given
    )
    history = (
        oracle.quantize_dequantize(k.double(), 0.7),
        oracle.quantize_dequantize(v.double(), 1.3),
    )
    exact = oracle.attend(q, *history, **given)
    assert float((plain.double() - exact).norm() / exact.norm()) < 3e-3


def test_fp8_round_trip_by_hand():
    # e4m3 has 3 mantissa bits: 1, 1.125, …; ties go to even; the largest is 448.
    x = torch.tensor([1.0, 1.06, 1.0625, 1.1875, 0.3, -448.0, 460.0, -1e9], dtype=torch.float64)
    expected = [1.0, 1.0, 1.0, 1.25, 0.3125, -448.0, 448.0, -448.0]
    assert oracle.quantize_dequantize(x, 1.0).tolist() == expected
    for scale in (0.5, 2.0):
        found = oracle.quantize_dequantize(x * scale, scale).tolist()
        due = [e * scale for e in expected]
        said = f"with scale {scale} FP8 values saturate at 448 times it, {448 * scale}"
        assert found == due, f"{said}: {found}, expected {due}"
    assert oracle.quantize(x, 1.0).dtype == torch.float8_e4m3fn


def test_rotation_by_hand():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    c, s, c2, s2 = math.cos(2), math.sin(2), math.cos(0.2), math.sin(0.2)
    at = torch.tensor([2])
    interleaved = oracle.rotate(x, at, theta=100.0, interleaved=True).flatten().tolist()
    assert interleaved == pytest.approx([c - 2 * s, s + 2 * c, 3 * c2 - 4 * s2, 3 * s2 + 4 * c2])
    neox = oracle.rotate(x, at, theta=100.0, interleaved=False).flatten().tolist()
    assert neox == pytest.approx([c - 3 * s, 2 * c2 - 4 * s2, s + 3 * c, 2 * s2 + 4 * c2])


def test_rotation_keeps_dtype_and_only_distance_matters():
    q, k, _ = drawn(3, 0, heads=2, kv_heads=2)
    turned = [
        oracle.rotate(t, torch.arange(3) + shift, theta=50.0, interleaved=True)
        for t in (q, k)
        for shift in (0, 90_000)
    ]
    assert turned[0].dtype == torch.float32
    near, far = turned[0] @ turned[2].mT, turned[1] @ turned[3].mT
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
