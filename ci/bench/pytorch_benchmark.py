"""PyTorch's open benchmark format: a record per arm and case, with the number of every trial.

The format is that of pytorch/pytorch's wiki, "PyTorch OSS benchmark infra", which SGLang's and
vLLM's dashboards on hud.pytorch.org read.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from ci.bench.case_report import CaseReport
from harness.bench.session_records import ArmFacts
from harness.core.record import Environment

NAME = "specgate bench"


def document(rows: Iterable[CaseReport]) -> str:
    """A JSON list; cases without a valid block and controls are left out."""
    shown = [row for row in rows if row.evidence.blocks and not row.is_control]
    entries = [entry for row in shown for entry in _entries(row)]
    return json.dumps(entries, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _entries(row: CaseReport) -> Iterator[dict[str, Any]]:
    workload, environment = row.workload, row.session.environment
    asked: dict[str, Any] = {
        "batch_size": workload.batch_size,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "requests": workload.requests,
    }
    if workload.bench_serving is not None:
        asked = {"bench_serving": shlex.join(workload.bench_serving)}
    for letter, arm in (("A", row.session.a), ("B", row.session.b)):
        verdict = {"verdict": str(row.verdict), "ratio_b_to_a": row.evidence.ratio}
        values = [
            value
            for block in row.blocks
            if not block.invalid
            for of, value in zip(block.order, block.values, strict=True)
            if of == letter
        ]
        yield {
            "benchmark": {"name": NAME, "mode": "inference", "extra_info": asked},
            "model": {"name": workload.id, "type": "server", "backend": arm.name},
            "metric": {
                "name": row.metric,
                "unit": row.unit,
                "benchmark_values": values,
                "extra_info": {"arm": letter, "session": row.session.id, **verdict},
            },
            "runners": [_runner(environment)],
            "dependencies": _dependencies(arm),
        }


def _runner(environment: Environment) -> dict[str, Any]:
    return {
        "name": environment.device,
        "type": environment.platform,
        "cpu_info": environment.processor,
        "gpu_info": environment.driver,
    }


def _dependencies(arm: ArmFacts) -> dict[str, Any]:
    return {name: {"version": version} for name, version in arm.versions.items()}
