"""What a backend of sglang asks its model runner for, from a case and its pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from harness.core.case import Case, Family, Mode
from harness.sglang.pools import alias_pool
from harness.sglang.process import load
from harness.sglang.shared_allocator import new_allocator
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.memory_pool import KVPool

DRAFT_MODES = frozenset({Mode.MULTI_STEP_DRAFT, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})


class ModelConfig(SimpleNamespace):
    """The model's shape, by sglang's names."""

    def get_num_kv_heads(self, tp_size: int, dcp_size: int = 1) -> int:
        """KV heads on a rank."""
        return int(self.num_key_value_heads)

    def get_num_attention_heads(self, tp_size: int) -> int:
        """Query heads on a rank."""
        return int(self.num_attention_heads)

    def get_max_num_attention_heads(self) -> int:
        """Query heads of the layer that has most."""
        return int(self.num_attention_heads)


def model_config(case: Case) -> ModelConfig:
    """The configuration of a model that has the case's layers."""
    mla = case.family is Family.MLA
    arch = load("srt.configs.model_config").AttentionArch
    head_dim = case.kv_lora_rank + case.qk_rope_head_dim if mla else case.head_dim
    value_dim = case.kv_lora_rank if mla else case.head_dim
    text = SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        hidden_size=case.num_q_heads * value_dim,
        num_attention_heads=case.num_q_heads,
        num_key_value_heads=1 if mla else case.num_kv_heads,
        head_dim=head_dim,
    )
    text.get_text_config = lambda: text
    window = case.window_left if case.window_left >= 0 else None
    return ModelConfig(
        **{name: getattr(text, name) for name in vars(text) if name != "get_text_config"},
        attention_arch=arch.MLA if mla else arch.MHA,
        context_len=case.max_context_len,
        v_head_dim=value_dim,
        swa_v_head_dim=value_dim,
        swa_head_dim=head_dim,
        kv_lora_rank=case.kv_lora_rank,
        qk_nope_head_dim=case.kv_lora_rank,
        qk_rope_head_dim=case.qk_rope_head_dim,
        scaling=case.scaling,
        vocab_size=1,
        dtype=getattr(torch, case.dtype),
        is_encoder_decoder=False,
        is_multimodal=False,
        model_is_mrope=False,
        is_generation=True,
        quantization=None,
        is_hybrid_swa=window is not None,
        is_local_attention_model=False,
        attention_chunk_size=None,
        sliding_window_size=window,
        num_hidden_layers=case.num_layers,
        hf_config=text,
        hf_text_config=text,
        linear_attn_registry_result=None,
    )


def new_model_runner(
    case: Case,
    *,
    backend: str,
    server_args: Any,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool: KVPool,
    device: torch.device | str,
) -> SimpleNamespace:
    """A stand-in of ``ModelRunner`` with real pools of sglang over our memory.

    Args:
        case: decides shapes, dtypes and whether this is the draft worker.
        backend: SGLang's name of the attention backend.
        server_args: published already.
        req_to_token_pool: the request-to-token table.
        token_to_kv_pool: the pool of the model that runs.
        device: of every buffer.
    """
    kv_dtype = token_to_kv_pool.dtype
    config = model_config(case)
    pool = alias_pool(token_to_kv_pool, device)
    is_draft_worker = case.mode in DRAFT_MODES
    table = req_to_token_pool.req_to_token
    rows = table.shape[0]
    allocator = new_allocator(case, pool, is_draft_worker)
    algorithm = load("srt.speculative.spec_info").SpeculativeAlgorithm
    made = SimpleNamespace(
        device=str(device),
        gpu_id=0,
        dtype=getattr(torch, case.dtype),
        kv_cache_dtype=kv_dtype,
        kv_cache_dtype_str="auto",
        prefill_attention_backend_str=backend,
        decode_attention_backend_str=backend,
        draft_attention_backend=None,
        page_size=case.page_size,
        model_config=config,
        model=torch.nn.Module(),
        is_draft_worker=is_draft_worker,
        extends_draft=case.mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2),
        spec_algorithm=algorithm.EAGLE,
        server_args=server_args,
        max_running_requests=rows,
        max_total_num_tokens=(pool.size),
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=rows - 1, device=str(device)),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        attn_cp_size=1,
        tp_size=1,
        dp_size=1,
        pp_size=1,
        attention_chunk_size=None,
        hisparse_coordinator=None,
        canary_manager=None,
        init_new_workspace=False,
        is_hybrid_swa=config.is_hybrid_swa,
        sliding_window_size=config.sliding_window_size,
        use_mla_backend=case.family is Family.MLA,
        hybrid_gdn_config=None,
        kimi_linear_config=None,
        linear_attn_model_spec=None,
        decode_num_tokens_per_req=lambda **_: case.num_draft_tokens,
    )
    made.kv_index_translator = _translator(made)
    return made


def _translator(runner: SimpleNamespace) -> Any:
    """The translator of KV indices, from 0.5.20 on."""
    try:
        translator = load("srt.mem_cache.kv_index_translator").KVIndexTranslator
    except ModuleNotFoundError:
        return None
    given = {
        "req_to_token": runner.req_to_token_pool.req_to_token,
        "token_to_kv_pool_allocator": runner.token_to_kv_pool_allocator,
        "token_to_kv_pool": runner.token_to_kv_pool,
        "page_size": runner.page_size,
        "device": runner.device,
        "is_draft_worker": runner.is_draft_worker,
    }
    names = translator.__init__.__code__.co_varnames
    return translator(**{name: value for name, value in given.items() if name in names})
