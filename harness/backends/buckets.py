"""Metadata of captured graphs: buffers a phase, and the slice of them each bucket was given."""

from __future__ import annotations

from harness.backends.geometry import Geometry
from harness.backends.metadata import Metadata, MetadataWriter
from harness.errors import CapacityError, ContractError, rejected
from harness.upstream.batch import ForwardMode

CAPTURED_MODES = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND,
    ForwardMode.DRAFT_EXTEND_V2,
)


class Buckets:
    """One metadata object a captured (phase, batch size); phases share no storage.

    Args:
        writer: allocates the buffers.
        padded_modes: phases whose ragged queries are padded.
    """

    def __init__(self, writer: MetadataWriter, padded_modes: frozenset[ForwardMode]) -> None:
        self._writer = writer
        self._padded_modes = padded_modes
        self._buffers: dict[ForwardMode, Metadata] = {}
        self._captured: dict[tuple[ForwardMode, int], Metadata] = {}

    def allocate(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room in every phase.

        Buffers that are large enough stay where they are: another runner's graphs read them. Where
        they are too small, new ones take their place for captures to come, and what was captured
        keeps the old.
        """
        for mode in CAPTURED_MODES:
            held = self._buffers.get(mode)
            bs, tokens = (held.geometry.bs, held.geometry.num_tokens) if held else (0, 0)
            if bs < max_bs or tokens < max_num_tokens:
                largest = Geometry(
                    forward_mode=mode,
                    bs=max(bs, max_bs),
                    num_tokens=max(tokens, max_num_tokens),
                    max_q_len=-(-max(tokens, max_num_tokens) // max(bs, max_bs)),
                    pads_queries=mode in self._padded_modes,
                )
                self._buffers[mode] = self._writer.allocate(largest)

    def capture(self, geometry: Geometry) -> None:
        """Slice the buffers for a bucket.

        Raises:
            ContractError: nothing is allocated for the phase.
            CapacityError: the bucket is larger than the buffers.
        """
        mode = geometry.forward_mode
        if mode not in self._buffers:
            modes = [
                mode.name for mode in self._buffers
            ] or "none: call init_cuda_graph_state first"
            raise ContractError(rejected("captured mode", mode.name, modes))
        buffers = self._buffers[mode]
        for field in ("bs", "num_tokens"):
            value, limit = getattr(geometry, field), getattr(buffers.geometry, field)
            if value > limit:
                accepted = f"<= {limit}, as init_cuda_graph_state was told"
                raise CapacityError(rejected(field, value, accepted))
        self._captured[mode, geometry.bs] = self._writer.cut(buffers, geometry)

    def find(self, mode: ForwardMode, bs: int) -> Metadata:
        """The metadata a bucket was captured on.

        Raises:
            CapacityError: it was not captured.
        """
        if (mode, bs) not in self._captured:
            buckets = sorted(size for captured, size in self._captured if captured is mode)
            raise CapacityError(rejected("bs", bs, f"captured {mode.name} buckets {buckets}"))
        return self._captured[mode, bs]
