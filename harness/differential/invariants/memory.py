"""Invariants of memory: addresses, padding, the request table, cache slots, semaphores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from harness.differential.invariants.classes import INDEX_SPACE, LIFETIME, PADDING
from harness.kernels.workspace import Workspace
from harness.upstream.allocator import PADDING_SLOT


def frozen(holder: Any, numbers: bool = True) -> dict[str, object]:
    """Address, shape and dtype of an object's tensors, and its scalars where ``numbers`` are."""
    return {
        name: (value.data_ptr(), tuple(value.shape), value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in vars(holder).items()
        if numbers or isinstance(value, torch.Tensor)
    }


def check_frozen(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Two results of ``frozen``, or any two mappings from names to addresses, are the same."""
    names = sorted(before.keys() | after.keys())
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return [f"{name} was {old}, is {new} [{LIFETIME}]" for name, old, new in pairs if old != new]


def check_padding(
    buffers: Mapping[str, torch.Tensor], pads: Mapping[str, float], rows: Mapping[str, int]
) -> list[str]:
    """Every element after the real rows of a static buffer holds its declared pad.

    Args:
        buffers: name -> tensor whose first dimension is rows.
        pads: name -> declared value.
        rows: name -> real rows.
    """
    found = []
    for name, buffer in buffers.items():
        if name not in pads or name not in rows:
            found.append(f"{name} declares no pad or no row count [{PADDING}]")
            continue
        tail = buffer[rows[name] :]
        if not tail.numel():
            continue
        stale = (tail != pads[name]).reshape(tail.shape[0], -1).any(-1)
        hit = stale.nonzero().flatten().tolist()
        if hit:
            where = f"{name}[{rows[name] + hit[0]}]"
            found.append(f"{where} and {len(hit) - 1} more are not {pads[name]} [{PADDING}]")
    return found


def check_table(written: torch.Tensor, table: torch.Tensor) -> list[str]:
    """A request-to-token table [rows, tokens] holds what was written; forwards only read it."""
    wrong = (table != written).nonzero().tolist()
    if not wrong:
        return []
    row, token = wrong[0]
    old, new = int(written[row, token]), int(table[row, token])
    entry = f"req_to_token[{row}, {token}] and {len(wrong) - 1} more"
    return [f"{entry}: was {old}, is {new} [{INDEX_SPACE}]"]


def check_writes(
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    slots: Mapping[str, Iterable[int]],
    page_size: int,
) -> list[str]:
    """Exactly the expected slots of every cache buffer changed; the padding slot may.

    Args:
        before: name -> copy of a buffer [slots, …], poisoned where nothing was written yet.
        after: the buffers.
        slots: name -> slots that a forward had to write.
        page_size: slots per page, to name the page.
    """
    found = []
    for name, old in before.items():
        if name not in after or name not in slots:
            found.append(f"{name} has no expected slots or is gone [{INDEX_SPACE}]")
            continue
        changed = (_bits(old) != _bits(after[name])).any(-1).nonzero().flatten().tolist()
        expected = set(slots[name])
        for fault, wrong in (
            ("was overwritten", set(changed) - expected - {PADDING_SLOT}),
            ("was not written", expected - set(changed)),
        ):
            if wrong:
                slot = min(wrong)
                where = f"slot {slot} (page {slot // page_size}) and {len(wrong) - 1} more"
                found.append(f"{name} {where}: {fault} [{INDEX_SPACE}]")
    return found


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """[slots, words of the widest dtype that fits]; NaN equals itself here."""
    rows = buffer.detach().contiguous().reshape(buffer.shape[0], -1)
    words = (torch.int64, torch.int32, torch.int16)
    size = rows.shape[1] * rows.element_size()
    return rows.view(next((word for word in words if size % word.itemsize == 0), torch.uint8))


def check_semaphores(workspaces: Iterable[Workspace]) -> list[str]:
    """Between launches every semaphore of every workspace is zero; reads the device."""
    found = []
    for shared in workspaces:
        dirty = shared.semaphores.nonzero().flatten()
        if dirty.numel():
            where = f"byte {int(dirty[0])} and {dirty.numel() - 1} more"
            found.append(f"semaphores of {shared.name}: {where} are not 0 [{LIFETIME}]")
    return found
