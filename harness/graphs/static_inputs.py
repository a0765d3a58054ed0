"""The static inputs of a captured graph, one field each, padded and then copied into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from harness.errors import CapacityError, ContractError, rejected
from harness.upstream.forward_batch_info import ForwardBatch


class Rows(Enum):
    """The owner of one row of a buffer."""

    REQUEST = auto()
    TOKEN = auto()
    ANY = auto()


@dataclass(frozen=True, kw_only=True)
class Field:
    """One static input.

    Args:
        name: its key in ``runner.buffers`` and ``runner.pads``.
        read: where a batch carries it; None where it does not.
        pad: what every padded element holds.
        dtype: its dtype; a batch with another one is refused.
        rows: what a row belongs to; ANY is flat and as long as the batch's tensor.
        steps: outermost blocks, each padded by itself (a draft's step-major cache slots).
        width: shape of a row.
        filled_after_draft: by ``run``, not by ``prepare``: unknown before the draft tokens are.
    """

    name: str
    read: Callable[[ForwardBatch], torch.Tensor | None]
    pad: float
    dtype: torch.dtype = torch.int64
    rows: Rows = Rows.REQUEST
    steps: int = 1
    width: tuple[int, ...] = ()
    filled_after_draft: bool = False


@dataclass(frozen=True)
class Extent:
    """The part of the buffers that a batch fills: its requests and tokens, and its bucket's."""

    bs: int
    tokens: int
    bucket: int
    bucket_tokens: int


@dataclass(frozen=True)
class StaticBuffer:
    """A field and its memory, [steps * rows of the largest bucket, *width]."""

    field: Field
    tensor: torch.Tensor

    def window(self, extent: Extent) -> torch.Tensor:
        """The bucket's part, contiguous: [steps, rows, *width]."""
        rows = {Rows.REQUEST: extent.bucket, Rows.TOKEN: extent.bucket_tokens}
        size = rows.get(self.field.rows, self.tensor.shape[0])
        steps = self.field.steps
        return self.tensor[: steps * size].view(steps, size, *self.field.width)

    def padding(self, extent: Extent, real: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything after ``real`` rows of each step, and everything after the bucket."""
        window = self.window(extent)
        return window[:, real:], self.tensor[window.shape[0] * window.shape[1] :]

    def pad(self, extent: Extent, real: int) -> None:
        """Return whatever an earlier batch left there to the declared pad."""
        for stale in self.padding(extent, real):
            if stale.numel():
                stale.fill_(self.field.pad)

    def copy(self, batch: ForwardBatch, extent: Extent) -> None:
        """Pad the stale tail, then copy the batch's tensor in front of it.

        Raises:
            ContractError: the batch lacks the tensor, or it has another dtype or shape.
            CapacityError: a flat tensor is longer than its buffer.
        """
        source = self.field.read(batch)
        if source is None:
            if self.field.rows is Rows.ANY:
                return
            raise ContractError(rejected(self.field.name, None, "a tensor, as captured"))
        real = self.real_rows(source, extent)
        self._check(source, real)
        self.pad(extent, real)
        if source.data_ptr() != self.tensor.data_ptr():
            steps = self.field.steps
            self.window(extent)[:, :real].copy_(source.view(steps, real, *self.field.width))

    def real_rows(self, source: torch.Tensor, extent: Extent) -> int:
        """Rows a step that the batch fills."""
        rows = {Rows.REQUEST: extent.bs, Rows.TOKEN: extent.tokens}
        return rows.get(self.field.rows, source.shape[0])

    def _check(self, source: torch.Tensor, real: int) -> None:
        name = self.field.name
        if source.dtype != self.field.dtype:
            raise ContractError(rejected(f"{name}.dtype", source.dtype, self.field.dtype))
        if self.field.rows is Rows.ANY and real > self.tensor.shape[0]:
            raise CapacityError(rejected(f"len({name})", real, f"at most {self.tensor.shape[0]}"))
        shape = (self.field.steps * real, *self.field.width)
        if tuple(source.shape) != shape:
            raise ContractError(rejected(f"{name}.shape", tuple(source.shape), shape))


class StaticInputs:
    """Every static input of a runner by name, allocated at its pad for the largest bucket."""

    def __init__(self, fields: Sequence[Field], largest: Extent, device: torch.device) -> None:
        self.by_name: dict[str, StaticBuffer] = {}
        rows = {Rows.REQUEST: largest.bucket, Rows.TOKEN: largest.bucket_tokens}
        for field in fields:
            shape = (field.steps * rows[field.rows], *field.width)
            memory = torch.full(shape, field.pad, dtype=field.dtype, device=device)
            self.by_name[field.name] = StaticBuffer(field, memory)

    def adopt(self, field: Field, memory: torch.Tensor) -> None:
        """Take in a flat buffer that a backend owns and its kernels read."""
        self.by_name[field.name] = StaticBuffer(field, memory.fill_(field.pad))

    def windows(self, extent: Extent) -> dict[str, torch.Tensor]:
        """A bucket's part of each buffer: [steps, rows, *width]."""
        return {name: buffer.window(extent) for name, buffer in self.by_name.items()}

    def copy(self, batch: ForwardBatch, extent: Extent, *, filled_after_draft: bool) -> None:
        """Copy the batch's tensors of before or after drafting; each buffer is padded first."""
        for buffer in self.by_name.values():
            if buffer.field.filled_after_draft is filled_after_draft:
                buffer.copy(batch, extent)

    def addresses(self, batch: ForwardBatch) -> dict[str, int]:
        """Where the batch has what is copied before drafting, by name."""
        early = (b.field for b in self.by_name.values() if not b.field.filled_after_draft)
        sources = {field.name: field.read(batch) for field in early}
        return {name: source.data_ptr() for name, source in sources.items() if source is not None}

    def changed(self) -> list[str]:
        """Names of buffers that do not hold their pad everywhere."""
        return [
            name
            for name, buffer in self.by_name.items()
            if not bool((buffer.tensor == buffer.field.pad).all())
        ]

    def padding(self, batch: ForwardBatch, extent: Extent) -> dict[str, torch.Tensor]:
        """Every padded element of each buffer, flat, as it is after a copy of ``batch``."""
        padded = {}
        for name, buffer in self.by_name.items():
            source = buffer.field.read(batch)
            if source is not None:
                parts = buffer.padding(extent, buffer.real_rows(source, extent))
                padded[name] = torch.cat([part.flatten() for part in parts])
        return padded
