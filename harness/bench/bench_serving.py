"""Other people's load: a pass that is one run of ``sglang.bench_serving``."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import TypeAdapter

from harness.bench.jsonl import validated
from harness.bench.load_generator import WorkloadRun
from harness.bench.session_records import Sample, Workload
from harness.errors import ContractError, UsageError, rejected
from harness.server.launch.process import run_guarded

MODULES = ("sglang.bench_serving", "sglang.benchmark.serving")
"""Its names: the first is deprecated since 0.5.16, which brought the second."""
OURS = (
    "--backend",
    "--base-url",
    "--disable-stream",
    "--flush-cache",
    "--host",
    "--output-details",
    "--output-file",
    "--port",
    "--warmup-requests",
)
"""Options that are not passed through: warm-ups and flushes are this project's, and without a
stream there is no TTFT."""
ALWAYS = ("--backend=sglang", "--warmup-requests=0", "--output-details", "--disable-tqdm")
PATIENCE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class BenchServingResult:
    """What the program writes of one run, with its details; a list has one item per request.

    Args:
        duration: seconds.
        output_lens: tokens, 0 of a request that failed.
        ttfts: seconds, 0 where no text came.
        itls: seconds; of a chunk with n tokens n times the n-th part of its gap.
        errors: empty where there is none.
        accept_length: since the last flush, as the server counts it; None where it does not.
    """

    duration: float
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    errors: list[str]
    accept_length: float | None = None


RESULT = TypeAdapter(BenchServingResult)


def workload(arguments: str) -> Workload:
    """The workload that a run with these arguments is; its id follows from them.

    Raises:
        UsageError: they cannot be split into words, or one of them is an option of ``OURS``.
    """
    try:
        words = tuple(shlex.split(arguments))
    except ValueError as error:
        accepted = f"words as of a shell ({error})"
        raise UsageError(rejected("bench-serving", arguments, accepted)) from error
    for word in words:
        name = word.partition("=")[0]
        # Its parser takes the beginning of an option for the option.
        if name.startswith("--") and any(option.startswith(name) for option in OURS):
            accepted = f"any option but {', '.join(OURS)}"
            raise UsageError(rejected("bench-serving", word, accepted))
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()
    return Workload(
        id=f"bench-serving-{digest[:8]}",
        batch_size=0,
        input_len=0,
        output_len=0,
        requests=0,
        bench_serving=words,
    )


@dataclass(frozen=True, kw_only=True)
class BenchServing:
    """The program of an interpreter's sglang.

    Args:
        python: the interpreter.
        patience_s: seconds until a run must have ended.
    """

    python: str = sys.executable
    patience_s: float = PATIENCE_S

    def __call__(self, url: str, workload: Workload) -> WorkloadRun:
        """Run it once against a server.

        Raises:
            ContractError: it did not end well; the message has the last line that it printed.
            UsageError: what it wrote is no result.
        """
        assert workload.bench_serving is not None
        with TemporaryDirectory(prefix="bench-serving-") as folder:
            written, log = Path(folder, "result.jsonl"), Path(folder, "log")
            where = (f"--base-url={url}", f"--output-file={written}")
            for module in MODULES:
                words = (self.python, "-m", module, *workload.bench_serving, *ALWAYS, *where)
                code = run_guarded(words, log=log, patience_s=self.patience_s)
                said = _last_line(log.read_text(encoding="utf-8", errors="replace"))
                if f"No module named {module}" not in said:
                    break
            if code or not written.is_file():
                raise ContractError(f"{module} of {self.python} ended with {code}: {said}")
            return passed(written.read_text(encoding="utf-8"))


def passed(text: str) -> WorkloadRun:
    """The pass that a line of the program's output file tells.

    Raises:
        ContractError: it has no request, or lists of several lengths.
        UsageError: it is no result with details.
    """
    result = validated(RESULT, text)
    counts = {len(each) for each in (result.output_lens, result.ttfts, result.itls, result.errors)}
    if len(counts) > 1 or 0 in counts:
        accepted = "as many numbers, texts and errors as requests, and one at least"
        raise ContractError(rejected("requests of bench_serving", sorted(counts), accepted))
    samples, failures = [], []
    rows = zip(result.output_lens, result.ttfts, result.itls, result.errors, strict=True)
    for index, (tokens, ttft, itl, error) in enumerate(rows):
        if error or not tokens or not ttft:
            failures.append(f"request {index}: {_last_line(error) or 'no text came'}")
        else:
            samples.append(_sample(tokens, ttft, itl))
    return WorkloadRun(
        samples=tuple(samples),
        failures=tuple(failures),
        seconds=result.duration,
        accept_length=result.accept_length,
    )


def _sample(tokens: int, ttft: float, itl: Sequence[float]) -> Sample:
    gaps = [sum(alike) for _, alike in groupby(itl)]  # of the tokens of one chunk
    return Sample(
        ttft_ms=1e3 * ttft,
        latency_ms=1e3 * (ttft + sum(gaps)),
        chunk_gaps_ms=tuple(1e3 * gap for gap in gaps),
        completion_tokens=tokens,
        spec_verify_ct=0,
        cached_tokens=None,
    )


def _last_line(text: str) -> str:
    return next(iter(reversed(text.strip().splitlines())), "")
