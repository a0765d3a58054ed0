"""The pools of a trial: history where requests own slots, poison everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from harness.core.case import Case, Family, KVDtype
from harness.differential.dense import cast_by_layer, dense_rows
from harness.differential.input_types import BatchInputs, ProbeWeights, TrialInputs
from harness.differential.traced_inputs import PADDING, UNOWNED, tracer_row
from harness.upstream.allocator import PADDING_ROW, PADDING_SLOT, ReqToTokenPool
from harness.upstream.memory_pool import KVPool, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool

# Slots nobody owns hold NaN: whoever reads one shows it. The padding page is finite, because padded
# rows do read it, and large, because real rows must not.
PADDING_VALUE = 100.0
TOGETHER = 1 << 13
"""Tokens of a batch that are rotated at once; longer ones take memory request by request."""


@dataclass(frozen=True)
class PoolState:
    """The pools of a trial on one device."""

    inputs: TrialInputs
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool
    device: torch.device

    @property
    def case(self) -> Case:
        """The case under test."""
        return self.inputs.case

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every cache buffer by name, [slots, …]."""
        pool = self.token_to_kv_pool
        if isinstance(pool, MLATokenToKVPool):
            return {f"kv{i}": buffer for i, buffer in enumerate(pool.kv_buffer)}
        parts = {"": pool} if isinstance(pool, MHATokenToKVPool) else _swa_parts(pool)
        return {
            f"{prefix}{name}{i}": buffer
            for prefix, part in parts.items()
            for name, buffers in (("k", part.k_buffer), ("v", part.v_buffer))
            for i, buffer in enumerate(buffers)
        }

    def copies(self) -> dict[str, torch.Tensor]:
        """Copies of every cache buffer, by name."""
        return {name: buffer.clone() for name, buffer in self.buffers().items()}

    def restore(self, copies: dict[str, torch.Tensor]) -> None:
        """Write copies of every cache buffer back."""
        for name, buffer in self.buffers().items():
            buffer.copy_(copies[name])

    def rows(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cached keys and values of a layer at slots [n] of the full pool; of MLA no values."""
        pool = self.token_to_kv_pool
        if isinstance(pool, MLATokenToKVPool):
            return pool.kv_buffer[layer][slots], None
        if isinstance(pool, MHATokenToKVPool):
            return pool.k_buffer[layer][slots], pool.v_buffer[layer][slots]
        part, index = pool.full_pool, layer // 2
        if layer % 2:
            part = pool.swa_pool
            slots = torch.tensor(self.inputs.swa_slots(slots.tolist()), dtype=torch.int64)
        return part.k_buffer[index][slots], part.v_buffer[index][slots]


def _swa_parts(pool: SWAKVPool) -> dict[str, MHATokenToKVPool]:
    return {"full.": pool.full_pool, "swa.": pool.swa_pool}


def make_pool_state(
    inputs: TrialInputs, device: torch.device | str = "cpu", unread: float = torch.nan
) -> PoolState:
    """Allocate the pools, poison them, and write the request table and the history.

    Args:
        inputs: what to set up.
        device: of the pools.
        unread: value of slots that no query may see.
    """
    device = torch.device(device)
    case = inputs.case
    table = ReqToTokenPool(inputs.req_pool_size, case.max_total_len + case.page_size, device)
    stale = torch.tensor(inputs.stale_slots, dtype=torch.int32, device=device)
    table.req_to_token.copy_(
        stale[torch.arange(table.req_to_token.numel(), device=device) % len(stale)].view_as(
            table.req_to_token
        )
    )
    table.req_to_token[PADDING_ROW] = PADDING_SLOT
    pool_state = PoolState(inputs, table, _kv_pool(inputs, device), device)
    for name, buffer in pool_state.buffers().items():
        unowned, padding = torch.full((), unread), torch.full((), PADDING_VALUE)
        if inputs.traced:
            unowned, padding = (tracer_row(inputs, name, token) for token in (UNOWNED, PADDING))
        buffer.copy_(unowned.to(buffer.dtype).expand_as(buffer))
        buffer[: case.page_size] = padding.to(device=device, dtype=buffer.dtype)
    for batch in inputs.batches:
        _write(pool_state, batch)
    return pool_state


def _kv_dtype(case: Case) -> torch.dtype:
    auto = case.kv_dtype is KVDtype.AUTO
    dtype: torch.dtype = getattr(torch, case.dtype if auto else case.kv_dtype)
    return dtype


def _kv_pool(inputs: TrialInputs, device: torch.device) -> KVPool:
    case = inputs.case
    common: dict[str, Any] = {
        "page_size": case.page_size,
        "dtype": _kv_dtype(case),
        "device": device,
    }
    if case.family is Family.MLA:
        return MLATokenToKVPool(
            num_pages=inputs.num_pages,
            num_layers=case.num_layers,
            kv_lora_rank=case.kv_lora_rank,
            qk_rope_head_dim=case.qk_rope_head_dim,
            **common,
        )

    def pool(num_pages: int, num_layers: int) -> MHATokenToKVPool:
        return MHATokenToKVPool(
            num_pages=num_pages,
            num_layers=num_layers,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            **common,
        )

    if inputs.swa_page_of is None:
        return pool(inputs.num_pages, case.num_layers)
    swa_layers = frozenset(range(1, case.num_layers, 2))
    hybrid = SWAKVPool(
        full_pool=pool(inputs.num_pages, case.num_layers - len(swa_layers)),
        swa_pool=pool(inputs.num_swa_pages, len(swa_layers)),
        swa_layer_ids=swa_layers,
        num_layers=case.num_layers,
    )
    pages = torch.tensor(inputs.swa_page_of, device=device)
    offsets = torch.arange(case.page_size, device=device)
    slots = torch.where(pages[:, None] > 0, pages[:, None] * case.page_size + offsets, PADDING_SLOT)
    hybrid.full_to_swa_index_mapping.copy_(slots.flatten())
    return hybrid


def _write(pool_state: PoolState, batch: BatchInputs) -> None:
    """Enter every slot of the batch in the table, and write their history."""
    case, table = batch.case, pool_state.req_to_token_pool.req_to_token
    for i, row in enumerate(batch.req_pool_indices):
        slots = batch.slots(i, 0, len(batch.pages[i]) * case.page_size)
        table[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32, device=pool_state.device)
    if sum(case.prefix_lens) <= TOGETHER:
        _write_history(pool_state, batch, range(case.bs))
        return
    for i in range(case.bs):
        _write_history(pool_state, batch, [i])


def _write_history(pool_state: PoolState, batch: BatchInputs, requests: Sequence[int]) -> None:
    """Write keys and values of what requests have in the cache before the forward."""
    case, device = batch.case, pool_state.device
    lens = [len(batch.history[i]) for i in requests]
    if not sum(lens):
        return
    histories = tuple(batch.history[i] for i in requests)
    cached = _shared_rows if sum(lens) <= TOGETHER else _cached_rows
    keys, values = cached(pool_state.inputs.weights, case, histories, device)
    slots = torch.tensor(
        [slot for i, n in zip(requests, lens, strict=True) for slot in batch.slots(i, 0, n)]
    )
    pool = pool_state.token_to_kv_pool
    for layer in range(case.num_layers):
        if isinstance(pool, MLATokenToKVPool):
            _write_rows(pool.kv_buffer[layer], slots, keys[layer].flatten(1))
            continue
        part, index, where = _layer_slots(pool, layer, slots)
        _write_rows(part.k_buffer[index], where, keys[layer])
        _write_rows(part.v_buffer[index], where, values[layer])


def _cached_rows(
    weights: ProbeWeights,
    case: Case,
    histories: tuple[torch.Tensor, ...],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [L, n, kv heads, dim] of histories, as the cache holds them."""
    tokens = torch.cat(histories).to(device)
    positions = torch.cat([torch.arange(len(own), device=device) for own in histories])
    cast = partial(_cast, dtype=_kv_dtype(case))
    rows = dense_rows(weights.to(device), case, tokens, positions, queries=0, cast=cast)
    return rows.k, rows.v


# Trials of a row have the same histories: of its batch and, replayed, of two decoys.
_shared_rows = lru_cache(maxsize=3)(_cached_rows)


def _cast(rows: torch.Tensor, scales: Sequence[float], *, dtype: torch.dtype) -> torch.Tensor:
    """Rows [L, n, …] as the cache holds them, with the scale of each layer."""
    if dtype.itemsize > 1:
        return rows.to(dtype)
    limit = torch.finfo(dtype).max
    return cast_by_layer(rows, scales, dtype, lambda x, scale: (x / scale).clamp_(-limit, limit))


def _layer_slots(
    pool: MHATokenToKVPool | SWAKVPool, layer: int, slots: torch.Tensor
) -> tuple[MHATokenToKVPool, int, torch.Tensor]:
    if isinstance(pool, MHATokenToKVPool):
        return pool, layer, slots
    if layer % 2 == 0:
        return pool.full_pool, layer // 2, slots
    return pool.swa_pool, layer // 2, pool.full_to_swa_index_mapping.cpu()[slots]


def _write_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    mapped = slots != PADDING_SLOT
    buffer[slots[mapped].to(buffer.device)] = rows[mapped.to(rows.device)]
