"""Functions of decoder layers, all recordable in a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import linear, silu

from harness.errors import ContractError, rejected
from harness.upstream.forward_batch_info import ForwardBatch, LogitsProcessorOutput

LayerWeights = Mapping[str, torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]


def under(weights: LayerWeights, prefix: str) -> dict[str, torch.Tensor]:
    """The weights whose names start with ``prefix``, without it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` [..., n] over its root mean square (in float32), times ``weight`` [n]."""
    return torch.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight


def swiglu(x: torch.Tensor, weights: LayerWeights, prefix: str = "mlp.") -> torch.Tensor:
    """The gated MLP under ``prefix``: [T, hidden] to [T, hidden]."""
    gate = silu(linear(x, weights[f"{prefix}gate_proj.weight"]))
    up = linear(x, weights[f"{prefix}up_proj.weight"])
    return linear(gate * up, weights[f"{prefix}down_proj.weight"])


def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device | str) -> torch.Tensor:
    """[rotary_dim / 2] float64 radians a position."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    return theta**-exponents


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
    """Cosine and sine [T, 1, rotary_dim / 2] float32 of each position.

    Angles are float64: a float32 angle at position 4096 is off by 2e-4 radians already.
    """
    angles = positions.double()[:, None, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate_halves(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotate [T, heads, dim] pairing entry i with i + dim / 2 (Llama's layout)."""
    cos, sin = by
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rotate_pairs(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotate [T, heads, dim] pairing entry 2 i with 2 i + 1 (DeepSeek's layout)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(*by)).flatten(-2).to(x.dtype)


def predict(hidden: torch.Tensor, lm_head: torch.Tensor) -> LogitsProcessorOutput:
    """Float32 logits [T, vocab] of ``hidden`` [T, hidden], and the hidden states beside them."""
    return LogitsProcessorOutput(linear(hidden, lm_head).float(), hidden)


def hidden_before(batch: ForwardBatch) -> torch.Tensor:
    """[T, hidden]: the hidden state of the token before each query token, as a draft is given it.

    Raises:
        ContractError: the batch carries none.
    """
    hidden: torch.Tensor | None = getattr(batch.spec_info, "hidden_states", None)
    if hidden is None:
        given = type(batch.spec_info).__name__
        raise ContractError(rejected("spec_info.hidden_states", given, "[tokens, hidden]"))
    return hidden
