"""Metadata of captured graphs: a place a phase, and the slice of it each bucket was given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.backends.geometry import Geometry
from harness.backends.metadata import Metadata, Sheet
from harness.backends.writer import MetadataWriter
from harness.errors import CapacityError, ContractError, rejected
from harness.upstream.batch import ForwardMode

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
    """One metadata object a captured (phase, batch size); phases share no storage.

    Args:
        writer: allocates the buffers.
        padded_modes: phases whose ragged queries are padded.
    """

    def __init__(self, writer: MetadataWriter, padded_modes: frozenset[ForwardMode]) -> None:
        self._writer = writer
        self._padded_modes = padded_modes
        self._places: dict[ForwardMode, Place] = {}
        self._captured: dict[tuple[ForwardMode, int], Metadata] = {}

    def allocate(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room in every phase.

        Buffers that are large enough stay where they are: another runner's graphs read them. Where
        they are too small, new ones take their place for captures to come, and what was captured
        keeps the old.
        """
        for mode in CAPTURED_MODES:
            held = self._places.get(mode)
            bs, tokens = (held.largest.bs, held.largest.num_tokens) if held else (0, 0)
            if bs < max_bs or tokens < max_num_tokens:
                largest = Geometry(
                    forward_mode=mode,
                    bs=max(bs, max_bs),
                    num_tokens=max(tokens, max_num_tokens),
                    max_q_len=-(-max(tokens, max_num_tokens) // max(bs, max_bs)),
                    pads_queries=mode in self._padded_modes,
                )
                self._places[mode] = Place(self._writer.sheet(largest), largest)

    def settle(self, mode: ForwardMode, place: Place) -> None:
        """Plan captures to come of a mode in a place that others share."""
        self._places[mode] = place

    def capture(self, geometry: Geometry) -> None:
        """Slice the buffers for a bucket.

        Raises:
            ContractError: nothing is allocated for the phase.
            CapacityError: the bucket is larger than the buffers.
        """
        mode = geometry.forward_mode
        if mode not in self._places:
            modes = [mode.name for mode in self._places] or "none: call init_cuda_graph_state first"
            raise ContractError(rejected("captured mode", mode.name, modes))
        place = self._places[mode]
        for field in ("bs", "num_tokens"):
            value, limit = getattr(geometry, field), getattr(place.largest, field)
            if value > limit:
                accepted = f"<= {limit}, as init_cuda_graph_state was told"
                raise CapacityError(rejected(field, value, accepted))
        if place.covers is not None:
            geometry = replace(geometry, table_headroom=place.covers - geometry.kv_offset)
        self._captured[mode, geometry.bs] = place.sheet.cut(geometry, place.phase)

    def find(self, mode: ForwardMode, bs: int) -> Metadata:
        """The metadata a bucket was captured on.

        Raises:
            CapacityError: it was not captured.
        """
        if (mode, bs) not in self._captured:
            buckets = sorted(size for captured, size in self._captured if captured is mode)
            raise CapacityError(rejected("bs", bs, f"captured {mode.name} buckets {buckets}"))
        return self._captured[mode, bs]
