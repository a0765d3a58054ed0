"""The command of a real sglang server with a shipped pair and EAGLE (flags of sglang 0.5.14)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.serving.launch import Launch, free_port

READY_S = 300.0
MAX_TOTAL_TOKENS, MEM_FRACTION_STATIC = 20_000, 0.3
"""Little enough for several servers side by side on one GPU."""


def sglang(
    *,
    target: Path,
    draft: Path | None,
    attention_backend: str,
    num_steps: int = 3,
    num_draft_tokens: int = 4,
    max_running_requests: int = 16,
    context_length: int = 2048,
    python: str = sys.executable,
    args: Sequence[str] = (),
) -> Launch:
    """A server of the sglang that ``python`` has.

    Args:
        target: folder of the model.
        draft: folder of its draft; without one nothing is speculated.
        attention_backend: of target and draft, such as "triton".
        num_steps: drafts a round, top-k 1.
        num_draft_tokens: of a chain.
        max_running_requests: and the largest batch that graphs are captured for.
        context_length: tokens a request.
        python: an interpreter; two wheels are two environments.
        args: further flags, which win over those set here.
    """
    port = free_port()
    flags: dict[str, object] = {
        "model-path": target,
        "attention-backend": attention_backend,
        "host": "127.0.0.1",
        "port": port,
        "nccl-port": free_port(),
        "context-length": context_length,
        "max-running-requests": max_running_requests,
        "cuda-graph-max-bs": max_running_requests,
        "max-total-tokens": MAX_TOTAL_TOKENS,
        "mem-fraction-static": MEM_FRACTION_STATIC,
        "random-seed": 0,
        "log-level": "warning",
    }
    if draft is not None:
        flags |= {
            "speculative-algorithm": "NEXTN" if _is_mla(target) else "EAGLE",
            "speculative-draft-model-path": draft,
            "speculative-num-steps": num_steps,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": num_draft_tokens,
        }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return Launch(
        name=f"sglang {attention_backend}",
        # Idle servers of a wave must not keep a core busy while another one is measured.
        argv=(python, "-m", "sglang.launch_server", *words, "--sleep-on-idle", *args),
        url=f"http://127.0.0.1:{port}",
        ready_s=READY_S,
    )


def _is_mla(target: Path) -> bool:
    return "DeepseekV3ForCausalLM" in (target / "config.json").read_text(encoding="utf-8")
