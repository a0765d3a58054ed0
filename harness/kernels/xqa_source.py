"""XQA's source, corrected where the installed FlashInfer is older than 0.6.17.

Of the blocks that share the keys of a request, each writes its partial answer to the output and the
last one to finish the whole. A block that is held up after it has been counted, as on a GPU that
processes take turns on, writes its part over the whole (flashinfer#4161, corrected in 0.6.17).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from packaging.version import Version

from harness.core.capability import XQA
from harness.core.whole_file import write_whole
from harness.errors import UsageError, rejected
from harness.kernels.packages import load

FILE = "mha.cu"
CORRECTED_IN = (0, 6, 17)
WRITES = "    if (warpGrpIdx == 0) {\n#if SPEC_DEC\n      copyOutputToGlobalMem("
Edits = tuple[tuple[str, str], ...]
"""What stands in the source exactly once, and what instead."""
COUNTED: Edits = (
    ("    if (isMultiBlock) {\n", "    bool isLast = !isMultiBlock;\n    if (isMultiBlock) {\n"),
    (
        "bool const isLastCta = mbsmem.isLastCta;\n",
        "bool const isLastCta = mbsmem.isLastCta;\n      isLast = isLastCta;\n",
    ),
)
LAST_WRITES: Edits = (
    *COUNTED,
    (WRITES, WRITES.replace("warpGrpIdx == 0", "isLast && warpGrpIdx == 0")),
)


def edited(source: str, edits: Edits) -> str:
    """A source with edits.

    Raises:
        UsageError: it does not hold what is replaced exactly once.
    """
    for old, new in edits:
        if source.count(old) != 1:
            accepted = f"one place of {old.strip()!r}"
            raise UsageError(rejected(FILE, f"{source.count(old)} places", accepted))
        source = source.replace(old, new)
    return source


@dataclass(frozen=True)
class EditedModule:
    """What describes to FlashInfer the modules of XQA, from a source with edits.

    Args:
        generate: FlashInfer's own ``gen_xqa_module``.
        edits: of ``mha.cu``.
        name: of the edits, a part of each module's, so that none compiled without them is taken.
        folder: for edited sources.
    """

    generate: Callable[..., Any]
    edits: Edits
    name: str
    folder: Path

    def __call__(self, *args: Any, **more: Any) -> Any:
        """FlashInfer's ``JitSpec``.

        Raises:
            UsageError: the installed source is not one that the edits are for.
        """
        spec = self.generate(*args, **more)
        (installed,) = (source for source in spec.sources if source.name == FILE)
        name = f"{spec.name}_{self.name}"
        source = self.folder / name / FILE
        text = edited(installed.read_text(encoding="utf-8"), self.edits)
        source.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(source.with_suffix(".lock")):
            # A source that is written again is compiled again, by every rank of a server.
            if not source.exists() or source.read_text(encoding="utf-8") != text:
                write_whole(source, text)
        sources: Sequence[Path] = [source if one == installed else one for one in spec.sources]
        headers = [*(spec.extra_include_dirs or ()), installed.parent]
        return replace(spec, name=name, sources=sources, extra_include_dirs=headers)


def compile_edited(edits: Edits, name: str) -> None:
    """Let this process compile XQA from its installed source with edits, from now on."""
    xqa = load("flashinfer.xqa", XQA.name)
    generate = xqa.gen_xqa_module
    if isinstance(generate, EditedModule):
        if generate.name == name:
            return
        generate = generate.generate
    folder = load("flashinfer.jit", XQA.name).env.FLASHINFER_GEN_SRC_DIR
    xqa.gen_xqa_module = EditedModule(generate, edits, name, Path(folder))
    xqa.get_xqa_module.cache_clear()


def compile_corrected() -> None:
    """Let this process compile XQA so that the last block alone writes, where it does not yet."""
    if Version(load("flashinfer", XQA.name).__version__).release < CORRECTED_IN:
        compile_edited(LAST_WRITES, "last_writes")
