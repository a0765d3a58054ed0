"""FlashInfer's batch wrappers over paged keys: plan on the host, run on what the plan left.

A plan reads its index tensors on the host and keeps what it saw in the integer workspace. Without
CUDA graphs it keeps the very index tensors too; with them it copies their values into the buffers
that the constructor was given, which a captured run reads again at each replay. Facts are of
flashinfer 0.6 and later: flashinfer/decode.py, flashinfer/prefill.py.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.errors import KernelRefusal, rejected
from harness.kernels.csr_attention import csr_attention, pack_mask
from harness.kernels.shape_checks import ShapeCheck, refuse_unless

MAX_REQUESTS = 4096
# Group sizes that the decode kernel without tensor cores is compiled for.
DECODE_GROUP_SIZES = (1, 2, 3, 4, 6, 8)
HEAD_DIMS = (64, 128, 256)


class CompiledModule:
    """What a plan hands the host's numbers to; a run finds them in the integer workspace."""

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        *options: object,
    ) -> list[int]:
        """Queries and keys per request into the integer workspace [2, MAX_REQUESTS]."""
        store(int_workspace, qo_indptr.diff(), kv_lens)
        return []


class DecodeModule:
    """The same without tensor cores: one query for each request."""

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned: torch.Tensor,
        kv_indptr: torch.Tensor,
        *options: object,
    ) -> list[int]:
        """As above."""
        lens = kv_indptr.diff()
        store(int_workspace, torch.ones_like(lens), lens)
        return []


def store(int_workspace: torch.Tensor, *rows: torch.Tensor) -> None:
    """Write host numbers into the integer workspace, row by row."""
    for row, numbers in zip(int_workspace, rows, strict=True):
        host = ("host numbers", str(numbers.device), "on the cpu")
        refuse_unless("plan", [(numbers.device.type == "cpu", *host)])
        row[: len(numbers)].copy_(numbers)


class Wrapper:
    """What every wrapper has.

    Args:
        float_workspace_buffer: of kernels; the reference takes none.
        kv_layout: "NHD".
        use_cuda_graph: whether index buffers are given here and stay where they are.
        backend: name of the kernel family.
    """

    workspace_rows = 2
    begin_forward: Any
    run: Any
    _qo_indptr_buf: Any

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        if kv_layout != "NHD":
            raise KernelRefusal(rejected("kv_layout", kv_layout, "NHD"))
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.zeros(
            self.workspace_rows, MAX_REQUESTS + 1, dtype=torch.int32
        )
        self._pin_memory_int_workspace_buffer = torch.zeros(0)
        self._use_cuda_graph = use_cuda_graph
        self._backend = "fa2" if backend == "auto" else backend
        self._plan_info: Any = None
        self._cached_module: Any = None
        self._cached_q_data_type: torch.dtype | None = None
        self._cached_kv_data_type: torch.dtype | None = None
        self._cached_o_data_type: torch.dtype | None = None
        self._max_total_num_rows: int | None = None
        self._qo_indptr_last = 0
        self._geometry = (0, 0, 0)
        self._planned_window = -1
        self._window_left = -1
        self._sm_scale: float | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether a captured run reads the constructor's buffers."""
        return self._use_cuda_graph

    def end_forward(self) -> None:
        """Nothing to do, as in FlashInfer."""

    def _keep_dtypes(self, q: str | torch.dtype, kv: str | torch.dtype | None) -> None:
        self._cached_q_data_type = self._cached_o_data_type = dtype_of(q)
        self._cached_kv_data_type = dtype_of(q if kv is None else kv)

    def _keep(self, **given: torch.Tensor) -> None:
        """Each index tensor itself, or its values where a graph holds the buffer."""
        for name, tensor in given.items():
            refuse_unless(
                "plan", [(tensor.dtype == torch.int32, f"{name}.dtype", tensor.dtype, torch.int32)]
            )
            if not self._use_cuda_graph:
                setattr(self, name, tensor)
                continue
            buffer: torch.Tensor = getattr(self, name)
            is_list = name.endswith("indices_buf")
            fits = len(tensor) <= len(buffer) if is_list else len(tensor) == len(buffer)
            accepted = f"{'<= ' if is_list else ''}{len(buffer)}, the buffer's"
            refuse_unless("plan", [(fits, f"{name} size", len(tensor), accepted)])
            if buffer.data_ptr() != tensor.data_ptr():
                buffer[: len(tensor)].copy_(tensor)

    def _checked(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse a run that is not what was planned."""
        entry = type(self).__name__
        if self._cached_module is None:
            raise KernelRefusal(f"{entry}: {rejected('run', 'unplanned', 'a plan before it')}")
        heads, kv_heads, dim = self._geometry
        rows: list[ShapeCheck] = [
            (q.dtype == self._cached_q_data_type, "q.dtype", q.dtype, self._cached_q_data_type),
            (q.is_contiguous(), "q.stride", q.stride(), "a contiguous query"),
            (q.shape[1] == heads, "q.heads", q.shape[1], f"{heads}, as planned"),
            (q.shape[2] == dim, "q.head_dim", q.shape[2], f"{dim}, as planned"),
        ]
        for name, cache in (("keys", keys), ("values", values)):
            planned = self._cached_kv_data_type
            rows += [
                (cache.dtype == planned, f"{name}.dtype", cache.dtype, planned),
                (cache.shape[1] == kv_heads, f"{name}.heads", cache.shape[1], kv_heads),
            ]
        refuse_unless(entry, rows)

    def forward(
        self,
        q: torch.Tensor,
        *caches: Any,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        **scales: Any,
    ) -> Any:
        """``run`` with options that override those of the plan, but for the window's mask."""
        if logits_soft_cap:
            raise KernelRefusal(rejected("logits_soft_cap", logits_soft_cap, "0"))
        self._causal, self._window_left, self._sm_scale = causal, window_left, sm_scale
        return self.run(q, *caches, **scales)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """The same, with the base-2 logarithm of each softmax's sum [T, heads] float32."""
        return self.forward(*args, return_lse=True, **kwargs)

    @property
    def _masked_window(self) -> int:
        # A kernel has the window's mask compiled in where its plan asked for a window.
        return self._window_left if self._planned_window >= 0 else -1

    def _softmax_scale(self, q: torch.Tensor) -> float:
        return q.shape[-1] ** -0.5 if self._sm_scale is None else self._sm_scale

    @property
    def _workspaces(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
        )

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor | None = None,
        is_causal: bool = False,
        packed_mask: torch.Tensor | None = None,
        mask_indptr: torch.Tensor | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        self._checked(q, keys, values)
        rows = self._qo_indptr_last
        whole = (q.shape[0] == rows, "q rows", q.shape[0], f"{rows}, qo_indptr[-1]")
        refuse_unless(type(self).__name__, [whole])
        out, lse = csr_attention(
            q=q,
            keys=keys,
            values=values,
            qo_indptr=self._qo_indptr_buf,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_lens=None,
            planned=self._int_workspace_buffer,
            packed_mask=packed_mask,
            mask_indptr=mask_indptr,
            is_causal=is_causal,
            window_left=self._masked_window,
            scale=self._softmax_scale(q) * (1.0 if k_scale is None else k_scale),
            out_scale=1.0 if v_scale is None else v_scale,
            out_dtype=self._cached_o_data_type or q.dtype,
        )
        return (out, lse) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Ragged queries over slots of the cache; a custom mask replaces causality."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._causal = False
        if use_cuda_graph:
            require_buffers(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        **options: Any,
    ) -> None:
        """Read a batch's index tensors; ``options`` that change a result are refused."""
        refuse_options("plan", options)
        check_geometry(num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._keep_dtypes(q_data_type, kv_data_type)
        self._geometry = (num_qo_heads, num_kv_heads, head_dim_qk)
        qo_host, kv_host = qo_indptr.to("cpu"), paged_kv_indptr.to("cpu")
        self._qo_indptr_last = int(qo_host[-1])
        if self._max_total_num_rows is None:
            self._max_total_num_rows = self._qo_indptr_last
        most = self._max_total_num_rows
        fits = not self._use_cuda_graph or self._qo_indptr_last <= most
        accepted = f"<= {most}, as first planned"
        refuse_unless("plan", [(fits, "qo_indptr[-1]", self._qo_indptr_last, accepted)])
        self._keep(
            _qo_indptr_buf=qo_indptr,
            _paged_kv_indptr_buf=paged_kv_indptr,
            _paged_kv_indices_buf=paged_kv_indices,
            _paged_kv_last_page_len_buf=paged_kv_last_page_len,
        )
        self._keep_mask(custom_mask, qo_host, kv_host)
        self._cached_module = CompiledModule()
        self._plan_info = self._cached_module.plan(
            *self._workspaces, qo_host, kv_host, kv_host.diff()
        )
        self._causal, self._window_left = causal, window_left
        self._planned_window = window_left

    begin_forward = plan

    def _keep_mask(
        self, custom_mask: torch.Tensor | None, qo_host: torch.Tensor, kv_host: torch.Tensor
    ) -> None:
        packed = indptr = None
        if custom_mask is not None:
            packed, indptr = pack_mask(custom_mask.bool(), qo_host.diff() * kv_host.diff())
        if not self._use_cuda_graph:
            self._custom_mask_buf, self._mask_indptr_buf = packed, indptr
        elif packed is not None and indptr is not None:
            if self._custom_mask_buf is None or self._mask_indptr_buf is None:
                buffers = "custom_mask_buf and mask_indptr_buf"
                raise KernelRefusal(f"plan: {rejected('custom_mask', 'a tensor', buffers)}")
            self._custom_mask_buf[: len(packed)].copy_(packed)
            self._mask_indptr_buf.copy_(indptr)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """[T, heads, head_dim] in the query's dtype, and with it what ``return_lse`` asks for."""
        return self._attend(
            q,
            *map(token_pages, paged_kv_cache),
            kv_indptr=self._paged_kv_indptr_buf,
            kv_indices=self._paged_kv_indices_buf,
            is_causal=self._causal,
            packed_mask=self._custom_mask_buf,
            mask_indptr=self._mask_indptr_buf,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query for each request over slots of the cache."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self.use_tensor_cores = use_tensor_cores
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._qo_indptr_buf: Any = None
        if use_cuda_graph:
            assert paged_kv_last_page_len_buffer is not None
            self._qo_indptr_buf = _arange(len(paged_kv_last_page_len_buffer) + 1)
            require_buffers(self)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        **options: Any,
    ) -> None:
        """Read a batch's index tensors; ``options`` that change a result are refused."""
        self._keep(
            _paged_kv_indptr_buf=indptr,
            _paged_kv_indices_buf=indices,
            _paged_kv_last_page_len_buf=last_page_len,
        )
        q_dtype = q_data_type or data_type or "float16"
        self._keep_dtypes(q_dtype, kv_data_type or data_type)
        self._cached_module = CompiledModule() if self.use_tensor_cores else DecodeModule()
        self._planned_window = self._window_left = window_left
        self._plan(
            indptr.to("cpu"),
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            options,
        )

    begin_forward = plan

    def _plan(
        self,
        indptr_host: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        options: dict[str, Any],
    ) -> None:
        refuse_options("plan", options)
        check_geometry(num_qo_heads, num_kv_heads, head_dim, page_size)
        group, sizes = num_qo_heads // num_kv_heads, DECODE_GROUP_SIZES
        compiled = self.use_tensor_cores or group in sizes
        accepted = f"{sizes} without tensor cores"
        refuse_unless("plan", [(compiled, "group_size", group, accepted)])
        self._geometry = (num_qo_heads, num_kv_heads, head_dim)
        bs = self._qo_indptr_last = len(last_page_len)
        if not self._use_cuda_graph:
            self._qo_indptr_buf = _arange(bs + 1)
        host = indptr_host[: bs + 1]
        lens = (_arange(bs + 1), host, host.diff()) if self.use_tensor_cores else (host,)
        self._plan_info = self._cached_module.plan(*self._workspaces, *lens)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        k_scale: float | None = None,
        v_scale: float | None = None,
        q_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """[bs, heads, head_dim] in the query's dtype, and with it what ``return_lse`` asks for."""
        return self._attend(
            q,
            *map(token_pages, paged_kv_cache),
            kv_indptr=self._paged_kv_indptr_buf,
            kv_indices=self._paged_kv_indices_buf,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    window_left: int = -1,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    non_blocking: bool = True,
    global_override_indptr_cpu: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Plan again for given host lengths; the caller has filled the buffers."""
    if wrapper._cached_module is None:
        raise KernelRefusal(f"fast_decode_plan: {rejected('plan', 'first', 'after a plan')}")
    if not wrapper._use_cuda_graph:
        wrapper._paged_kv_indptr_buf = indptr
        wrapper._paged_kv_indices_buf = indices
        wrapper._paged_kv_last_page_len_buf = last_page_len
    buffer = wrapper._paged_kv_indices_buf
    assert buffer is not None
    accepted = f"<= {len(buffer)}, the buffer's"
    refuse_unless("plan", [(len(indices) <= len(buffer), "indices size", len(indices), accepted)])
    host = indptr.to("cpu") if global_override_indptr_cpu is None else global_override_indptr_cpu
    wrapper._plan(host, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, options)


def require_buffers(wrapper: Any) -> None:
    """Refuse a wrapper for graphs that was not given the buffers of its index tensors."""
    names = ("_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf")
    for name in ("_qo_indptr_buf", *names):
        if not isinstance(getattr(wrapper, name), torch.Tensor):
            raise KernelRefusal(rejected(name.strip("_"), None, "a tensor with use_cuda_graph"))
    indptr, bs = wrapper._paged_kv_indptr_buf, len(wrapper._paged_kv_last_page_len_buf)
    refuse_unless(
        type(wrapper).__name__,
        [(len(indptr) == bs + 1, "paged_kv_indptr_buf size", len(indptr), f"{bs + 1}")],
    )


def check_geometry(heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    """Refuse shapes that kernels are not compiled for, and pages of more than one token."""
    refuse_unless(
        "plan",
        [
            (heads % kv_heads == 0, "num_qo_heads", heads, f"a multiple of {kv_heads} KV heads"),
            (head_dim in HEAD_DIMS, "head_dim", head_dim, HEAD_DIMS),
            (page_size == 1, "page_size", page_size, "1: sglang lists token slots"),
        ],
    )


# Options of a plan that change how work is cut, and never a result.
SCHEDULING = ("fixed_split_size", "disable_split_kv", "token_pos_in_items_len", "o_data_type")


def refuse_options(entry: str, options: dict[str, Any]) -> None:
    """Refuse every option that is given and changes a result."""
    for name, value in options.items():
        if name not in SCHEDULING and value is not None:
            raise KernelRefusal(f"{entry}: {rejected(name, value, 'None')}")


def token_pages(cache: torch.Tensor) -> torch.Tensor:
    """Slots [slots, kv_heads, head_dim] of a cache, whose pages hold one token."""
    paged_dims = 4
    if cache.dim() == paged_dims:
        refuse_unless("run", [(cache.shape[1] == 1, "page_size", cache.shape[1], "1")])
        return cache[:, 0]
    return cache


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """A dtype, or that of a name."""
    return getattr(torch, name) if isinstance(name, str) else name


def _arange(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32)
