"""A runner: one graph a bucket of batch sizes, over one set of static buffers.

Four verbs. *prepare* checks a batch, fills the buffers and plans on the host; *record* captures
the device side of planning and the forward; *copy* pours a batch into static memory and never
rebinds it; *pad* returns the stale tail to its declared value first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from harness.errors import CapacityError, ContractError, rejected
from harness.graphs.captured_phase import Backend, Output, Phase
from harness.graphs.static_inputs import Extent, StaticInputs
from harness.upstream.forward_batch_info import ForwardBatch

T = TypeVar("T")


class Graph(Protocol):
    """Something recorded once and replayed on the same memory."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once, unrecorded, as a capture wants it."""
        ...

    def capture(self, run: Callable[[], T]) -> T:
        """Record ``run`` and return its outputs, whose storage every replay writes to."""
        ...

    def replay(self) -> None:
        """Run the recording on whatever its inputs hold now."""
        ...


GraphFactory = Callable[[], Graph]


class GraphRunner(Phase[Output, Backend]):
    """Captures a forward for some batch sizes and replays it for any batch that fits.

    Args:
        **phase: what ``Phase`` takes.

    Attributes:
        graphs: the captured graph of each bucket.
        captured_outputs: what each capture returned; replays write here.
    """

    def __init__(self, **phase: Any) -> None:
        super().__init__(**phase)
        self.graphs: dict[int, Graph] = {}
        self.captured_outputs: dict[int, Output] = {}
        self._batches: dict[int, ForwardBatch] = {}
        self._prepared: Extent | None = None
        self.inputs = StaticInputs(self.fields(), self._full(self.capture_bs[-1]), self.device)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The static inputs by name."""
        return {name: buffer.tensor for name, buffer in self.inputs.by_name.items()}

    @property
    def pads(self) -> dict[str, float]:
        """What every padded element of each static input holds after a copy."""
        return {name: buffer.field.pad for name, buffer in self.inputs.by_name.items()}

    def capture(self) -> None:
        """Record every bucket, the largest first, over synthetic batches that are all padding.

        Raises:
            ContractError: captured already, or the forward changed one of its static inputs.
        """
        if self.graphs:
            raise ContractError("a runner captures once; its graphs own their addresses")
        largest = self._full(self.capture_bs[-1])
        self.attn_backend.init_cuda_graph_state(largest.bucket, largest.bucket_tokens)
        self.adopt_backend_buffers()
        for bucket in reversed(self.capture_bs):
            self.record(bucket)

    def record(self, bucket: int) -> None:
        """Warm up and capture one bucket."""
        extent = self._full(bucket)
        batch = self.static_batch(extent)
        if self.attn_backend.needs_cpu_seq_lens:
            batch.seq_lens_cpu = torch.full((bucket,), self.seq_len_pad, dtype=torch.int64)
            batch.seq_lens_sum = bucket * self.seq_len_pad
        self.attn_backend.init_forward_metadata_out_graph(batch, in_capture=True)

        def run() -> Output:
            self.attn_backend.init_forward_metadata_in_graph(batch)
            return self.finish(self.forward(batch), batch)

        graph = self.new_graph()
        graph.warm_up(run)
        self.attn_backend.on_after_cuda_graph_warmup()
        self.captured_outputs[bucket] = graph.capture(run)
        if changed := self.inputs.changed():
            raise ContractError(f"the forward changed its static inputs {changed} while recording")
        self.graphs[bucket], self._batches[bucket] = graph, batch

    def bucket(self, bs: int) -> int:
        """The smallest captured batch size that holds ``bs`` requests.

        Raises:
            CapacityError: ``bs`` exceeds the largest.
        """
        for size in self.capture_bs:
            if bs <= size:
                return size
        raise CapacityError(rejected("batch_size", bs, f"at most the largest of {self.capture_bs}"))

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether a bucket holds the batch and its shape is what was captured."""
        return batch.batch_size <= self.capture_bs[-1] and self.misfit(batch) is None

    def replay(self, batch: ForwardBatch) -> Output:
        """Run the batch on its bucket's graph; the result is a copy of its real rows.

        Raises:
            ContractError: not captured, or another mode, token count, dtype or shape than captured.
            CapacityError: no bucket is large enough.
        """
        self.prepare(batch)
        return self.run(batch)

    def prepare(self, batch: ForwardBatch) -> None:
        """Fill what is known before the draft tokens are, and plan on the host."""
        self._prepared = None
        extent = self._extent(batch)
        if extent.bucket not in self.graphs:
            raise ContractError("a runner replays after its capture")
        self.inputs.copy(batch, extent, late=False)
        planned = self._batches[extent.bucket].with_changes(**self.mirrors(batch, extent))
        self.attn_backend.init_forward_metadata_out_graph(planned)
        self._prepared = extent

    def run(self, batch: ForwardBatch) -> Output:
        """Fill what ``prepare`` could not know, replay, and copy the real rows out."""
        extent = self._extent(batch)
        if self._prepared != extent:
            raise ContractError(f"run follows prepare of its batch; prepared: {self._prepared}")
        self._prepared = None
        self.inputs.copy(batch, extent, late=True)
        self.graphs[extent.bucket].replay()
        return self.trim(self.captured_outputs[extent.bucket], extent)

    def padding(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        """Every padded element of every static input, flat, as it is after ``batch`` ran."""
        return self.inputs.padding(batch, self._extent(batch))

    def _full(self, bucket: int) -> Extent:
        tokens = bucket * self.num_tokens_per_req
        return Extent(bucket, tokens, bucket, tokens)

    def _extent(self, batch: ForwardBatch) -> Extent:
        bucket = self.bucket(batch.batch_size)
        if reason := self.misfit(batch):
            raise ContractError(reason)
        tokens = bucket * self.num_tokens_per_req
        return Extent(batch.batch_size, self.num_tokens(batch), bucket, tokens)
