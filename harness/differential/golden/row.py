"""What a golden keeps of a forward's answer, and the judgement of a forward by it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch

from harness.core.record import Verdict
from harness.core.tolerance import Budget
from harness.differential.compare import Comparison, compare
from harness.differential.expected import Answer
from harness.differential.golden.golden_entry import Golden

PROJECTED = 16
# Errors of 16 sums differ from their expectation by a factor of two less than once in a million
# rows, so no row in half its budget is refused; one element wrong by four times the budget of its
# row moves the sums by exactly as much, and is.
SLACK = 2.0


def project(hidden_states: torch.Tensor) -> torch.Tensor:
    """Sixteen sums of a row's elements with random signs: [T, hidden] to [T, 16] float64.

    An element that changes by d moves the row of sums by d, and lengths are kept in expectation
    (Achlioptas 2003). The signs depend on the width alone.
    """
    rows = hidden_states.detach().cpu().double()
    return rows @ _signs(rows.shape[-1])


@cache
def _signs(width: int) -> torch.Tensor:
    drawn = hashlib.shake_256(b"specgate golden").digest(width * PROJECTED // 8)
    octets = torch.frombuffer(bytearray(drawn), dtype=torch.uint8)
    bits = (octets[:, None] >> torch.arange(8)) & 1
    signs: torch.Tensor = (bits.double() * 2 - 1).view(width, PROJECTED)
    return signs / math.sqrt(PROJECTED)


def kept(answer: Answer) -> dict[str, torch.Tensor]:
    """The tensors of a row's golden, from the oracle's answer.

    Returns:
        ``logits``: [T, vocab] float32.
        ``hidden_states``: [T, 16] float32, as ``project`` has them.
    """
    return {
        "logits": answer.logits.float(),
        "hidden_states": project(answer.hidden_states).float(),
    }


def judge_by_golden(
    golden: Golden,
    obtained: Answer,
    rounding: Answer,
    fed_tokens: torch.Tensor | None,
    budgets: dict[str, Budget],
    locate: Sequence[str],
    *,
    oracle_agrees: bool,
) -> Iterator[Comparison]:
    """Logits and projected hidden states beside the recorded ones.

    A multi-step draft that chose another token than the oracle did when it was recorded is judged
    up to that token; the oracle of today answers for the rest.

    Args:
        golden: of the row.
        obtained: from the subject.
        rounding: what the plain dense implementation is off from the oracle today.
        fed_tokens: [bs, steps], what the subject's draft fed itself; None elsewhere.
        budgets: of both quantities, as the oracle judges them.
        locate: names of the T rows.
        oracle_agrees: whether the oracle of today has no complaint.
    """
    judged = torch.arange(len(golden.tensors["logits"]))
    if fed_tokens is not None:
        chosen = golden.tensors["logits"].argmax(-1).view(fed_tokens.shape)
        same = torch.ones_like(chosen)
        same[:, 1:] = (fed_tokens.cpu()[:, 1:] == chosen[:, :-1]).cumprod(-1)
        judged = same.flatten().nonzero().flatten()
    named = [locate[i] for i in judged]
    for name, own, off in (
        ("hidden_states", project(obtained.hidden_states), project(rounding.hidden_states)),
        ("logits", obtained.logits.detach().cpu().double(), rounding.logits),
    ):
        exact, own = golden.tensors[name].double()[judged], own[judged]
        allowed = budgets[name].times(SLACK)
        found = compare(f"golden.{name}", own, exact, exact + off[judged], allowed, named)
        if not found.passed:
            said = (
                "agrees: it has changed, or the golden has" if oracle_agrees else "refuses it too"
            )
            message = f"{found.message}; the oracle {said}"
            found = replace(found, verdict=Verdict.WRONG_GOLDEN, message=message)
        yield found
