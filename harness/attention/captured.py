"""Metadata of captured graphs: buffers for each phase, and a slice of them for each bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.attention.geometry import Geometry
from harness.attention.metadata import Metadata, MetadataBuffers
from harness.attention.metadata_writer import MetadataWriter
from harness.errors import CapacityError, ContractError, rejected
from harness.upstream.forward_batch_info import ForwardMode

CAPTURED_MODES = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND,
    ForwardMode.DRAFT_EXTEND_V2,
)


@dataclass(frozen=True)
class BufferSlice:
    """One phase of shared metadata buffers, for graphs of one mode.

    Args:
        buffers: the memory.
        largest: what it was made for.
        phase: which of the buffers' phases.
        num_table_keys: keys beyond ``seq_lens`` that the page table holds, None for the mode's own.
    """

    buffers: MetadataBuffers
    largest: Geometry
    phase: int = 0
    num_table_keys: int | None = None


class CapturedMetadata:
    """One metadata object for each captured (phase, batch size); phases may share memory.

    Args:
        writer: allocates the memory.
        padded_modes: phases whose ragged queries are padded.
    """

    def __init__(self, writer: MetadataWriter, padded_modes: frozenset[ForwardMode]) -> None:
        self._writer = writer
        self._padded_modes = padded_modes
        self._limits = {"bs": 0, "num_tokens": 0}
        self._slices: dict[ForwardMode, BufferSlice] = {}
        self._captured: dict[tuple[ForwardMode, int], Metadata] = {}

    def allocate(self, max_bs: int, max_num_tokens: int) -> None:
        """Set the size of later captures; a phase allocates it at its first capture.

        Memory that is large enough stays where it is: another runner's graphs read it. Where it is
        too small, later captures get their own, and earlier ones keep theirs.
        """
        asked = {"bs": max_bs, "num_tokens": max_num_tokens}
        self._limits = {name: max(asked[name], held) for name, held in self._limits.items()}

    def use_shared(self, mode: ForwardMode, shared: BufferSlice) -> None:
        """Plan a mode captured from now on in buffers that others share."""
        self._slices[mode] = shared

    def capture(self, geometry: Geometry) -> None:
        """Slice the memory for a bucket.

        Raises:
            ContractError: no room was asked for, or the phase is never captured.
            CapacityError: the bucket is larger than the room.
        """
        held = self._slice(geometry.forward_mode)
        for field in self._limits:
            value, limit = getattr(geometry, field), getattr(held.largest, field)
            if value > limit:
                accepted = f"<= {limit}, as init_cuda_graph_state was told"
                raise CapacityError(rejected(field, value, accepted))
        if held.num_table_keys is not None:
            geometry = replace(geometry, table_headroom=held.num_table_keys - geometry.kv_offset)
        key = geometry.forward_mode, geometry.bs
        self._captured[key] = held.buffers.slice(geometry, held.phase)

    def _slice(self, mode: ForwardMode) -> BufferSlice:
        held = self._slices.get(mode)
        if held is not None and (held.num_table_keys is not None or self._holds(held.largest)):
            return held
        bs, tokens = self._limits.values()
        if mode not in CAPTURED_MODES or not bs:
            modes = [one.name for one in CAPTURED_MODES] if bs else "none"
            accepted = f"{modes}: call init_cuda_graph_state first"
            raise ContractError(rejected("captured mode", mode.name, accepted))
        largest = Geometry(
            forward_mode=mode,
            bs=bs,
            num_tokens=tokens,
            max_q_len=-(-tokens // bs),
            pads_queries=mode in self._padded_modes,
        )
        self._slices[mode] = BufferSlice(self._writer.new_buffers(largest), largest)
        return self._slices[mode]

    def _holds(self, largest: Geometry) -> bool:
        return all(getattr(largest, name) >= value for name, value in self._limits.items())

    def find(self, mode: ForwardMode, bs: int) -> Metadata:
        """The metadata of a captured bucket.

        Raises:
            CapacityError: it was not captured.
        """
        if (mode, bs) not in self._captured:
            buckets = sorted(size for captured, size in self._captured if captured is mode)
            raise CapacityError(rejected("bs", bs, f"captured {mode.name} buckets {buckets}"))
        return self._captured[mode, bs]
