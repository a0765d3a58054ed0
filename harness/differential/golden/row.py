"""What a golden keeps of a forward's answer, and the judgement of a forward by it."""

from __future__ import annotations

import hashlib
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
    return (bits.double() * 2 - 1).view(width, PROJECTED) / PROJECTED**0.5


def kept(answer: Answer, fed_tokens: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors of a row's golden.

    Args:
        answer: the oracle's.
        fed_tokens: [bs, steps] int64, what a multi-step draft fed itself; None elsewhere.

    Returns:
        ``logits``: [T, vocab] float32.
        ``hidden_states``: [T, 16] float32, as ``project`` has them.
        ``fed_tokens``: [bs, steps] int32, where there are some.
    """
    tensors = {
        "logits": answer.logits.float(),
        "hidden_states": project(answer.hidden_states).float(),
    }
    return tensors if fed_tokens is None else tensors | {"fed_tokens": fed_tokens.int()}


def judge_by_golden(
    golden: Golden,
    obtained: Answer,
    reference: Answer,
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
        reference: from the plain dense implementation.
        fed_tokens: [bs, steps], what the subject's draft fed itself; None elsewhere.
        budgets: of both quantities, as the oracle judges them.
        locate: names of the T rows.
        oracle_agrees: whether the oracle of today has no complaint.
    """
    judged = torch.arange(len(golden.tensors["logits"]))
    if fed_tokens is not None:
        same = (fed_tokens.cpu() == golden.tensors["fed_tokens"]).int().cumprod(-1)
        judged = same.flatten().nonzero().flatten()
    named = [locate[i] for i in judged]
    for name, own, plain in (
        ("hidden_states", project(obtained.hidden_states), project(reference.hidden_states)),
        ("logits", obtained.logits.detach().cpu().double(), reference.logits.double()),
    ):
        exact = golden.tensors[name].double()[judged]
        allowed = budgets[name].times(SLACK)
        found = compare(f"golden.{name}", own[judged], exact, plain[judged], allowed, named)
        if not found.passed:
            said = (
                "agrees: it has changed, or the golden has" if oracle_agrees else "refuses it too"
            )
            message = f"{found.message}; the oracle {said}"
            found = replace(found, verdict=Verdict.WRONG_GOLDEN, message=message)
        yield found
