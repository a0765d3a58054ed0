"""A runner: one graph for each bucket of batch sizes, over one set of static buffers.

Four verbs. *prepare* checks a batch, fills the buffers and plans on the host; *record* captures
the device side of planning and the forward; *copy* writes a batch into static memory and never
rebinds it; *pad* returns the stale tail to its declared value first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from harness.errors import CapacityError, ContractError, UsageError, rejected
from harness.graphs.graph import Graph, GraphFactory
from harness.graphs.static_inputs import Extent, Field, Rows, StaticInputs
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.base_attn_backend import AttentionBackend, MultiStepDraftBackend
from harness.upstream.forward_batch_info import (
    DraftOutput,
    ForwardBatch,
    ForwardMode,
    LogitsProcessorOutput,
)
from harness.upstream.memory_pool import KVPool

Output = TypeVar("Output", LogitsProcessorOutput, DraftOutput)
Backend = TypeVar("Backend", bound=AttentionBackend | MultiStepDraftBackend)


class GraphRunner(ABC, Generic[Output, Backend]):
    """Captures a forward for some batch sizes and replays it for any batch that fits.

    A subclass says what its phase of speculative decoding needs: its static inputs, the batch that
    is captured and which rows of an output are real.

    Args:
        forward: the model's forward including attention, called after metadata is planned.
        attn_backend: plans the metadata that ``forward`` reads.
        new_graph: makes an empty graph.
        capture_bs: batch sizes to capture, positive and unique.
        req_to_token_pool: the request-to-token table the captured batches refer to.
        token_to_kv_pool: the KV pool of the model that runs.
        mode: the phase the graphs serve, one of ``modes``.
        num_tokens_per_req: query tokens per request; the most of them where they are ragged.
        hidden_size: width of the hidden states fed in, None where none are.
        hidden_dtype: their dtype.
        device: where the static buffers live.
        after_metadata: recorded between metadata and forward, where ``SharedReadEnds.IN_REPLAY``
            is; nothing by default.

    Attributes:
        modes: the phases this kind of runner serves.
        graphs: the captured graph of each bucket.
        captured_outputs: what each capture returned; replays write here.
        replays: how often each bucket's graph ran.

    Raises:
        UsageError: no batch size to capture, one that is not positive or comes twice, a mode of
            another runner, or no query token per request.
    """

    modes: tuple[ForwardMode, ...]

    def __init__(
        self,
        *,
        forward: Callable[[ForwardBatch], Output],
        attn_backend: Backend,
        new_graph: GraphFactory,
        capture_bs: Sequence[int],
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: KVPool,
        mode: ForwardMode,
        num_tokens_per_req: int = 1,
        hidden_size: int | None = None,
        hidden_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        after_metadata: Callable[[], None] | None = None,
    ) -> None:
        sizes = tuple(sorted(capture_bs))
        if not sizes or sizes[0] < 1 or len(set(sizes)) < len(sizes):
            raise UsageError(rejected("capture_bs", tuple(capture_bs), "positive, unique sizes"))
        if num_tokens_per_req < 1:
            raise UsageError(rejected("num_tokens_per_req", num_tokens_per_req, "at least 1"))
        if mode not in self.modes:
            raise UsageError(rejected("mode", mode, self.modes))
        self.forward: Callable[[ForwardBatch], Output] = forward
        self.attn_backend: Backend = attn_backend
        self.new_graph = new_graph
        self.capture_bs, self.mode, self.num_tokens_per_req = sizes, mode, num_tokens_per_req
        self.req_to_token_pool, self.token_to_kv_pool = req_to_token_pool, token_to_kv_pool
        self.hidden_size, self.hidden_dtype = hidden_size, hidden_dtype
        self.device, self.after_metadata = torch.device(device), after_metadata
        self.graphs: dict[int, Graph] = {}
        self.captured_outputs: dict[int, Output] = {}
        self.replays: Counter[int] = Counter()
        self._batches: dict[int, ForwardBatch] = {}
        self._prepared: tuple[Extent, dict[str, int]] | None = None
        self.inputs = StaticInputs(self.fields(), self._full(self.capture_bs[-1]), self.device)

    @abstractmethod
    def fields(self) -> tuple[Field, ...]:
        """The static inputs, one field each."""

    @abstractmethod
    def static_batch(self, extent: Extent) -> ForwardBatch:
        """The batch that is captured: a bucket's part of every static input."""

    @abstractmethod
    def trim(self, output: Output, extent: Extent) -> Output:
        """Copies of the rows that are real."""

    def mismatch_reason(self, batch: ForwardBatch) -> str | None:
        """Why the batch is not of the shape that was captured, or None."""
        bs, tokens = batch.batch_size, self.num_tokens(batch)
        if batch.forward_mode is not self.mode:
            return rejected("forward_mode", batch.forward_mode, repr(self.mode))
        if bs < 1:
            return rejected("batch_size", bs, "at least 1")
        if tokens not in self.token_counts(bs):
            return rejected("query tokens", tokens, f"{self.token_counts(bs)} for {bs} requests")
        return None

    def num_tokens(self, batch: ForwardBatch) -> int:
        """Query tokens, counted by cache slots: token ids may be filled after drafting."""
        return batch.out_cache_loc.shape[0]

    def token_counts(self, bs: int) -> range:
        """Query tokens that a batch of ``bs`` requests may have."""
        return range(bs * self.num_tokens_per_req, bs * self.num_tokens_per_req + 1)

    def finish(self, output: Output, batch: ForwardBatch) -> Output:
        """The output that a graph returns, computed after the forward; by default the forward's."""
        return output

    def adopt_backend_buffers(self) -> None:
        """Take in static inputs that the backend allocates; none by default."""
        return

    @property
    def seq_len_pad(self) -> int:
        """seq_lens of a padded request."""
        return self.attn_backend.get_cuda_graph_seq_len_fill_value()

    @property
    def accept_pad(self) -> int:
        """Query tokens of a padded request, where a batch carries their number."""
        return self.num_tokens_per_req

    def padded_cpu_lens(self, batch: ForwardBatch, extent: Extent) -> dict[str, Any]:
        """seq_lens_cpu and the other host copies that a batch carries, padded like the device's.

        What it does not carry is None, and not what the capture was planned with.
        """
        missing = extent.bucket - extent.bs
        padded: dict[str, Any] = {"seq_lens_cpu": None, "seq_lens_sum": None}
        if batch.seq_lens_cpu is not None:
            tail = batch.seq_lens_cpu.new_full((missing,), self.seq_len_pad)
            padded["seq_lens_cpu"] = torch.cat((batch.seq_lens_cpu, tail))
        if batch.seq_lens_sum is not None:
            padded["seq_lens_sum"] = batch.seq_lens_sum + missing * self.seq_len_pad
        if batch.extend_seq_lens_cpu is not None:
            padded["extend_seq_lens_cpu"] = batch.extend_seq_lens_cpu + [self.accept_pad] * missing
        return padded

    def hidden_field(
        self,
        read: Callable[[ForwardBatch], torch.Tensor | None],
        rows: Rows = Rows.REQUEST,
    ) -> tuple[Field, ...]:
        """The hidden states' row of ``fields``, if the phase is fed any."""
        if self.hidden_size is None:
            return ()
        width, dtype = (self.hidden_size,), self.hidden_dtype
        return (Field(name="hidden_states", read=read, pad=0, dtype=dtype, rows=rows, width=width),)

    def hidden_mismatch_reason(self, hidden_states: torch.Tensor | None) -> str | None:
        """Why hidden states are given where none were captured, or the reverse, or None."""
        if (hidden_states is None) is (self.hidden_size is None):
            return None
        given = None if hidden_states is None else tuple(hidden_states.shape)
        return rejected("hidden_states", given, f"hidden_size = {self.hidden_size}, as captured")

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
            if self.after_metadata is not None:
                self.after_metadata()
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
        return batch.batch_size <= self.capture_bs[-1] and self.mismatch_reason(batch) is None

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
        extent = self.extent(batch)
        if extent.bucket not in self.graphs:
            raise ContractError("a runner replays after its capture")
        self.inputs.copy(batch, extent, filled_after_draft=False)
        planned = self._batches[extent.bucket].with_changes(**self.padded_cpu_lens(batch, extent))
        self.attn_backend.init_forward_metadata_out_graph(planned)
        self._prepared = extent, self.inputs.addresses(batch)

    def run(self, batch: ForwardBatch) -> Output:
        """Fill what ``prepare`` could not know, replay, and copy the real rows out.

        Raises:
            ContractError: what was prepared is another batch: of another size, or of other tensors.
        """
        extent = self.extent(batch)
        if self._prepared is None or self._prepared[0] != extent:
            known = None if self._prepared is None else self._prepared[0]
            raise ContractError(f"run follows prepare of its batch; prepared: {known}")
        given, known_at = self.inputs.addresses(batch), self._prepared[1]
        if others := [name for name, at in known_at.items() if given.get(name) != at]:
            raise ContractError(f"run follows prepare of its batch; prepared with other {others}")
        self._prepared = None
        self.inputs.copy(batch, extent, filled_after_draft=True)
        self.graphs[extent.bucket].replay()
        self.replays[extent.bucket] += 1
        return self.trim(self.captured_outputs[extent.bucket], extent)

    def padding(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        """Every padded element of every static input, flat, as it is after ``batch`` ran."""
        return self.inputs.padding(batch, self.extent(batch))

    def _full(self, bucket: int) -> Extent:
        tokens = bucket * self.num_tokens_per_req
        return Extent(bucket, tokens, bucket, tokens)

    def extent(self, batch: ForwardBatch) -> Extent:
        """Requests and tokens of a batch, and its bucket's.

        Raises:
            CapacityError: no bucket is large enough.
            ContractError: the batch is not of the shape that was captured.
        """
        bucket = self.bucket(batch.batch_size)
        if reason := self.mismatch_reason(batch):
            raise ContractError(reason)
        tokens = bucket * self.num_tokens_per_req
        return Extent(batch.batch_size, self.num_tokens(batch), bucket, tokens)
