"""Metadata of captured graphs: a place a phase, and the slice of it each bucket was given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.attention.geometry import Geometry
from harness.attention.metadata import Metadata, Sheet
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
class Place:
    """Where a mode is planned: a phase of a sheet.

    Args:
        sheet: the memory.
        largest: what it was made for.
        phase: which of the sheet's phases.
        covers: keys beyond ``seq_lens`` that the sheet's table holds, None for the mode's own.
    """

    sheet: Sheet
    largest: Geometry
    phase: int = 0
    covers: int | None = None


class Buckets:
    """One metadata object a captured (phase, batch size); phases share memory only where settled.

    Args:
        writer: allocates the memory.
        padded_modes: phases whose ragged queries are padded.
    """

    def __init__(self, writer: MetadataWriter, padded_modes: frozenset[ForwardMode]) -> None:
        self._writer = writer
        self._padded_modes = padded_modes
        self._limits = {"bs": 0, "num_tokens": 0}
        self._places: dict[ForwardMode, Place] = {}
        self._captured: dict[tuple[ForwardMode, int], Metadata] = {}

    def allocate(self, max_bs: int, max_num_tokens: int) -> None:
        """Let captures to come have so much room; a phase takes it with its first capture.

        Memory that is large enough stays where it is: another runner's graphs read it. Where it is
        too small, captures to come get their own, and what was captured keeps the old.
        """
        asked = {"bs": max_bs, "num_tokens": max_num_tokens}
        self._limits = {name: max(asked[name], held) for name, held in self._limits.items()}

    def settle(self, mode: ForwardMode, place: Place) -> None:
        """Plan captures to come of a mode in a place that others share."""
        self._places[mode] = place

    def capture(self, geometry: Geometry) -> None:
        """Slice the memory for a bucket.

        Raises:
            ContractError: no room was asked for, or the phase is never captured.
            CapacityError: the bucket is larger than the room.
        """
        place = self._place(geometry.forward_mode)
        for field in self._limits:
            value, limit = getattr(geometry, field), getattr(place.largest, field)
            if value > limit:
                accepted = f"<= {limit}, as init_cuda_graph_state was told"
                raise CapacityError(rejected(field, value, accepted))
        if place.covers is not None:
            geometry = replace(geometry, table_headroom=place.covers - geometry.kv_offset)
        key = geometry.forward_mode, geometry.bs
        self._captured[key] = place.sheet.cut(geometry, place.phase)

    def _place(self, mode: ForwardMode) -> Place:
        held = self._places.get(mode)
        if held is not None and (held.covers is not None or self._holds(held.largest)):
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
        self._places[mode] = Place(self._writer.sheet(largest), largest)
        return self._places[mode]

    def _holds(self, largest: Geometry) -> bool:
        return all(getattr(largest, name) >= value for name, value in self._limits.items())

    def find(self, mode: ForwardMode, bs: int) -> Metadata:
        """The metadata a bucket was captured on.

        Raises:
            CapacityError: it was not captured.
        """
        if (mode, bs) not in self._captured:
            buckets = sorted(size for captured, size in self._captured if captured is mode)
            raise CapacityError(rejected("bs", bs, f"captured {mode.name} buckets {buckets}"))
        return self._captured[mode, bs]
