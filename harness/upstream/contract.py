"""What SGLang's runners and attention backends ask of each other, read from its source.

Nothing of it is imported, so a release is read where neither it nor its dependencies are installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError, rejected
from harness.upstream.flashinfer_calls import FlashInferCalls, read_flashinfer_calls

Contract = dict[str, dict[str, str]]
"""Text of every member, by class; arguments of every FlashInfer entry point, by its dotted name."""

PACKAGE = "sglang/srt"
ATTENTION = f"{PACKAGE}/layers/attention"
MEMORY = f"{PACKAGE}/mem_cache"
OWN = "(class)"
"""The member that tells the class itself: its bases and its file."""


@dataclass(frozen=True)
class WatchedClass:
    """A class whose members are recorded.

    Args:
        name: of the class.
        files: where releases have it; the first that defines it is read.
        since: the first recorded release that has it; empty if all do.
    """

    name: str
    files: tuple[str, ...]
    since: str = ""


BASE = (f"{ATTENTION}/base_attn_backend.py",)
BATCH = (f"{PACKAGE}/model_executor/forward_batch_info.py",)
EAGLE = (f"{PACKAGE}/speculative/eagle_info.py",)
POOLS = (f"{MEMORY}/memory_pool.py",)
FLASHINFER = (f"{ATTENTION}/flashinfer_backend.py",)
FLASHINFER_MLA = (f"{ATTENTION}/flashinfer_mla_backend.py",)
TRTLLM_MHA = (f"{ATTENTION}/trtllm_mha_backend.py",)
TRTLLM_MLA = (f"{ATTENTION}/trtllm_mla_backend.py",)
TRITON = (f"{ATTENTION}/triton_backend.py",)
WATCHED = (
    WatchedClass("AttentionBackend", BASE),
    WatchedClass("SharedReadEnds", BASE, since="0.5.18"),
    WatchedClass("VerifyMask", (f"{ATTENTION}/verify_mask.py",), since="0.5.18"),
    WatchedClass("ForwardMode", BATCH),
    WatchedClass("ForwardBatch", BATCH),
    WatchedClass("SpecInput", (f"{PACKAGE}/speculative/spec_info.py",)),
    WatchedClass("EagleDraftInput", EAGLE),
    WatchedClass("EagleVerifyInput", EAGLE),
    WatchedClass("EagleDraftExtendInput", EAGLE),
    WatchedClass("RadixAttention", (f"{PACKAGE}/layers/radix_attention.py",)),
    WatchedClass("KVCache", POOLS),
    WatchedClass("MHATokenToKVPool", POOLS),
    WatchedClass("MLATokenToKVPool", POOLS),
    WatchedClass("SWAKVPool", (f"{MEMORY}/swa_memory_pool.py",)),
    WatchedClass("KVIndexTranslator", (f"{MEMORY}/kv_index_translator.py",), since="0.5.20"),
    WatchedClass("KVLocPlan", (f"{MEMORY}/kv_loc_plan.py",), since="0.5.22"),
    WatchedClass("FlashInferAttnBackend", FLASHINFER),
    WatchedClass("FlashInferMultiStepDraftBackend", FLASHINFER),
    WatchedClass("FlashInferMLAAttnBackend", FLASHINFER_MLA),
    WatchedClass("FlashInferMLAMultiStepDraftBackend", FLASHINFER_MLA),
    WatchedClass("TRTLLMHAAttnBackend", TRTLLM_MHA),
    WatchedClass("TRTLLMHAAttnMultiStepDraftBackend", TRTLLM_MHA),
    WatchedClass("TRTLLMMLABackend", TRTLLM_MLA),
    WatchedClass("TRTLLMMLAMultiStepDraftBackend", TRTLLM_MLA),
    WatchedClass("TritonAttnBackend", TRITON),
    WatchedClass("TritonMultiStepDraftBackend", TRITON),
)
CALLERS = (*FLASHINFER, *FLASHINFER_MLA, *TRTLLM_MHA, *TRTLLM_MLA)
"""Files whose FlashInfer entry points are recorded."""


def read_contract(root: Path) -> Contract:
    """The contract of a release.

    Members are those without a leading underscore and ``__init__``; of an abstract class also those
    with one, which are hooks of its subclasses. Signatures have their defaults as written and no
    annotations. What a class inherits is told by its bases.

    Args:
        root: holds ``sglang/…``, as an unpacked wheel or the folder ``python`` of a checkout does.

    Raises:
        UsageError: a class is in none of its files, a file is missing, or is no Python.
    """
    sources = _Sources(root)
    contract = {}
    for watched in WATCHED:
        if found := sources.find(watched):
            contract[watched.name] = _members(*found)
    calls: FlashInferCalls = {}
    for file in CALLERS:
        read_flashinfer_calls(sources.module(file), Path(file).name, calls)
    for name, arguments in calls.items():
        contract[name] = {word: ", ".join(sorted(files)) for word, files in arguments.items()}
    return contract


class _Sources:
    """Modules under a folder, parsed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parsed: dict[str, ast.Module] = {}

    def module(self, file: str) -> ast.Module:
        if file not in self._parsed:
            path = self._root / file
            try:
                self._parsed[file] = ast.parse(path.read_bytes())
            except OSError as error:
                accepted = f"a folder that holds {file} ({error.strerror})"
                raise UsageError(rejected("source", str(self._root), accepted)) from error
            except (SyntaxError, ValueError) as error:
                accepted = f"a folder whose {file} is Python ({error})"
                raise UsageError(rejected("source", str(self._root), accepted)) from error
        return self._parsed[file]

    def find(self, watched: WatchedClass) -> tuple[ast.ClassDef, str] | None:
        """The class and its file; None where it is missing and newer than the first release."""
        for file in watched.files:
            if (self._root / file).is_file():
                for node in self.module(file).body:
                    if isinstance(node, ast.ClassDef) and node.name == watched.name:
                        return node, file
        if watched.since:
            return None
        accepted = f"a folder that defines {watched.name} in {' or '.join(watched.files)}"
        raise UsageError(rejected("source", str(self._root), accepted))


def _members(node: ast.ClassDef, file: str) -> dict[str, str]:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    kind = "enum member" if any(base.endswith("Enum") for base in bases) else "attribute"
    told = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    members = {OWN: f"class {node.name}{told} in {file}"}
    for name, text in _defined(node, kind):
        is_hook = "ABC" in bases and not name.startswith("__")
        if is_hook or not name.startswith("_") or name == "__init__":
            members[name] = text
    return members


def _defined(node: ast.ClassDef, kind: str) -> Iterator[tuple[str, str]]:
    """Name and text of whatever the body of a class assigns or defines."""
    for one in node.body:
        match one:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield one.name, _function(one)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                yield name, f"{kind}: {ast.unparse(annotation)}{_default(value)}"
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield target.id, f"{kind}{_default(value)}"


def _default(value: ast.expr | None) -> str:
    return f" = {ast.unparse(value)}" if value else ""


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
    if "setter" in decorators:
        return "settable property"
    if any(one.endswith("property") for one in decorators):
        return "property"
    kind = next((one for one in ("staticmethod", "classmethod") if one in decorators), "method")
    arguments = node.args
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    for argument in (*named, arguments.vararg, arguments.kwarg):
        if argument:
            argument.annotation = None
    return f"{kind} ({ast.unparse(arguments)})"
