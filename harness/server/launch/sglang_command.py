"""The command of an sglang server with EAGLE (flags of sglang 0.5.14, and their older names)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UsageError, rejected
from harness.plugin.switches import GPU_DELAY, PHASES
from harness.server.launch import one_gpu
from harness.server.launch.ports import free_port
from harness.server.launch.process import ServerSpec, flags

READY_S = 300.0
MAX_TOTAL_TOKENS, MEM_FRACTION_STATIC = 20_000, 0.3
"""Small enough for several servers on one GPU."""
DRAWN_WEIGHTS = ("--load-format", "dummy", "--skip-tokenizer-init")
"""Flags for a folder that holds a configuration alone."""
OLDER = {
    "--cuda-graph-max-bs-decode": "--cuda-graph-max-bs",
    "--disable-prefill-cuda-graph": "--disable-piecewise-cuda-graph",
}
RENAMED = (0, 5, 14)
"""The release whose names stand here; before it some flags had others."""


def sglang(
    *,
    target: Path,
    draft: Path | None,
    attention_backend: str,
    num_steps: int = 3,
    num_draft_tokens: int = 4,
    max_running_requests: int = 16,
    context_length: int = 2048,
    max_total_tokens: int = MAX_TOTAL_TOKENS,
    accept_length: int | None = None,
    tp_size: int = 1,
    is_on_one_gpu: bool = False,
    gpu_delay: bool = False,
    phases: bool = False,
    python: str = sys.executable,
    release: str | None = None,
    args: Sequence[str] = (),
) -> ServerSpec:
    """A server of the sglang that is installed for ``python``.

    Args:
        target: folder of the model.
        draft: folder of its draft, None for no speculation.
        attention_backend: of target and draft, such as "triton".
        num_steps: drafts per round, topk 1.
        num_draft_tokens: tokens of a chain.
        max_running_requests: most at a time, and the largest captured batch.
        context_length: most tokens per request.
        max_total_tokens: of the KV pool.
        accept_length: tokens that every verify accepts whatever was drafted; None simulates none.
        tp_size: ranks that share it, each with a GPU of its own.
        is_on_one_gpu: whether all ranks share the first GPU instead.
        gpu_delay: whether ``/slow_down`` delays the GPU, where our plugin is installed.
        phases: whether our plugin, installed beside it, times the phases of its steps.
        python: an interpreter; two wheels are two environments.
        release: of its sglang, such as "0.5.13"; None for one that knows the flags set here.
        args: further flags, which win over those set here.

    Raises:
        UsageError: more tokens would be accepted than a round has.
    """
    if accept_length is not None and accept_length > num_steps + 1:
        accepted = f"at most {num_steps + 1}, with num_steps = {num_steps}"
        raise UsageError(rejected("accept_length", accept_length, accepted))
    port = free_port()
    spec: dict[str, object] = {}
    if draft is not None:
        spec = {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": draft,
            "speculative_num_steps": num_steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": num_draft_tokens,
        }
    if tp_size > 1 and not is_on_one_gpu:
        spec["tp_size"] = tp_size
    words = flags(
        model_path=target,
        attention_backend=attention_backend,
        host="127.0.0.1",
        port=port,
        nccl_port=free_port(),
        context_length=context_length,
        max_running_requests=max_running_requests,
        cuda_graph_max_bs_decode=max_running_requests,
        max_total_tokens=max_total_tokens,
        mem_fraction_static=MEM_FRACTION_STATIC,
        random_seed=0,
        log_level="warning",
        **spec,
    )
    # Idle servers must not keep a core busy while another one is measured.
    argv = ("-m", "sglang.launch_server", *words, "--sleep-on-idle", *args)
    if release and _numbers(release) < RENAMED:
        argv = tuple(OLDER.get(word, word) for word in argv)
    return ServerSpec(
        name=f"sglang {attention_backend}",
        argv=one_gpu.command(python, tp_size, argv) if is_on_one_gpu else (python, *argv),
        url=f"http://127.0.0.1:{port}",
        # By itself sglang takes port + 10000 for gRPC, which beyond 55535 is no port.
        env={
            "HF_HUB_OFFLINE": "1",
            "SGLANG_GRPC_PORT": str(free_port()),
            # With a thread per core, the processes of several servers would wait for each other.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Suites on a CPU interpret their kernels; sglang's scheduler ends if its are.
            "TRITON_INTERPRET": "0",
            PHASES: str(int(phases)),
            GPU_DELAY: str(int(gpu_delay)),
            **_simulated(accept_length),
        },
        ready_s=READY_S,
    )


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[: len(RENAMED)])


def _simulated(accept_length: int | None) -> dict[str, str]:
    """Switches of sglang; with a whole number this method draws nothing."""
    if accept_length is None:
        return {}
    return {
        "SGLANG_SIMULATE_ACC_LEN": str(accept_length),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    }
