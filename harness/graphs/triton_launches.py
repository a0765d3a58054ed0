"""Launches of Triton's interpreter: seen by tapes and observers, and checked for stray pointers.

On a CPU a Triton kernel runs as Python over raw pointers, which no dispatched operation shows. A
launch that reads or writes outside of the memory it was given would corrupt the process; here it
raises, naming the kernel and the tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.core.dispatch_mode import tensors_in
from harness.errors import ContractError

Observer = Callable[["Launch"], None]
_observers: list[Observer] = []
_memory: list[Launch] = []


@dataclass(frozen=True)
class Launch:
    """One launch of an interpreted kernel.

    Args:
        name: of the kernel.
        execute: the interpreter's own launch.
        args: of the launch.
        kwargs: likewise.
    """

    name: str
    execute: Callable[..., None]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor it was given."""
        return tensors_in([*self.args, *self.kwargs.values()])

    def run(self) -> None:
        """Run it, unseen by modes of torch, and tell the observers: of a replay, too.

        Raises:
            ContractError: it read or wrote outside of its tensors' memory.
        """
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            _memory.append(self)
            try:
                with np.errstate(all="ignore"):  # a GPU does not warn of infinities
                    self.execute(*self.args, **self.kwargs)
            except Exception as error:
                raise ContractError(f"{self.name}: {error.__cause__ or error}") from error
            finally:
                _memory.pop()
        for observer in tuple(_observers):
            observer(self)


@contextmanager
def launches_seen(observer: Observer) -> Iterator[None]:
    """Inside, ``observer`` is told of every launch, after it ran."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def watch_interpreter() -> None:
    """Route every launch of Triton's interpreter through ``Launch``; once per process."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    original = executor.__call__
    if getattr(original, "is_watched", False):
        return

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        Launch(self.fn.__name__, lambda *a, **k: original(self, *a, **k), args, kwargs).run()

    launch.is_watched = True  # type: ignore[attr-defined]
    executor.__call__ = launch
    # It copies whole storages to the host and back, which on a CPU are the same memory.
    executor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda *_: None
    interpreter.InterpretedFunction.__call__ = _called(interpreter)
    for access in ("load", "store"):
        _check_pointers(builder, access)
    _round_to_nearest(builder, interpreter)
    _multiply_bfloat16(builder, interpreter)
    _read_clock(builder, interpreter)


def _called(interpreter: Any) -> Callable[..., object]:
    """A function that a kernel calls; the interpreter's own patches the language at each call.

    A launch patches the modules that its kernel names. A function of another file may name others:
    those of ``triton.language.standard`` name ``triton.language.core``.
    """
    language = interpreter.tl

    @cache
    def named(function: Callable[..., object]) -> list[Any]:
        values = function.__globals__.values()
        return [one for one in (language, language.core) if any(value is one for value in values)]

    def call(self: Any, *args: Any, **kwargs: Any) -> object:
        if any(language.core.is_builtin(one.load) for one in named(self.fn)):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    return call


def _multiply_bfloat16(builder: Any, interpreter: Any) -> None:
    """Multiply matrices of bfloat16 as numbers; the interpreter multiplies their bit patterns."""
    original, float32 = builder.create_dot, interpreter.tl.float32

    def dot(a: Any, b: Any, *rest: Any) -> Any:
        wide = [
            builder.create_fp_to_fp(x, float32, None) if x.dtype.scalar.is_bf16() else x
            for x in (a, b)
        ]
        return original(*wide, *rest)

    builder.create_dot = dot


def _read_clock(builder: Any, interpreter: Any) -> None:
    """Read the host's clock for ``%globaltimer``; the interpreter has no inline assembly."""

    def inline_asm(assembly: str, constraints: str, values: Any, kinds: Any, *rest: Any) -> Any:
        if "%globaltimer" not in assembly:
            raise ContractError(f"the interpreter cannot run {assembly!r}")
        now = np.array([time.perf_counter_ns()], dtype=np.int64)
        return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(now, kinds[0]))

    builder.create_inline_asm = inline_asm


def _round_to_nearest(builder: Any, interpreter: Any) -> None:
    """Cast to FP8 and to bfloat16 as GPUs do, to the nearest and saturating, and not truncating."""
    original, truncate = builder.create_fp_to_fp, builder.create_fp_trunc
    fp8, float32 = torch.float8_e4m3fn, interpreter.tl.float32
    limit = torch.finfo(fp8).max

    def cast(value: Any, kind: Any, rounding: Any = None) -> Any:
        to_fp8, to_bfloat16 = kind.scalar.is_fp8e4nv(), kind.scalar.is_bf16()
        if not (to_fp8 or to_bfloat16) or value.dtype.scalar == kind.scalar:
            return original(value, kind, rounding)
        wide = original(value, float32, None) if value.dtype.scalar.is_bf16() else value
        exact = torch.from_numpy(wide.data.astype(np.float32))
        if to_fp8:
            bits = exact.clamp(-limit, limit).to(fp8).view(torch.uint8).numpy()
        else:
            bits = exact.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, kind.scalar)

    builder.create_fp_to_fp = cast
    builder.create_fp_trunc = lambda value, kind: (
        cast(value, kind) if kind.scalar.is_bf16() else truncate(value, kind)
    )


def _check_pointers(builder: Any, access: str) -> None:
    original = getattr(builder, f"create_masked_{access}")
    mask_at = 1 if access == "load" else 2

    def checked(pointers: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[mask_at - 1].data
        size = pointers.dtype.element_ty.primitive_bitwidth // 8
        if _memory:
            _refuse_stray(_memory[-1], access, pointers.data[mask], max(size, 1))
        return original(pointers, *args, **kwargs)

    setattr(builder, f"create_masked_{access}", checked)


def _refuse_stray(launch: Launch, access: str, addresses: Any, size: int) -> None:
    if not addresses.size:
        return
    inside = np.zeros(addresses.shape, dtype=bool)
    spans = []
    for tensor in launch.tensors:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        spans.append((start, start + storage.nbytes(), tensor))
        inside |= (addresses >= start) & (addresses + size <= start + storage.nbytes())
    if not inside.all():
        stray = int(addresses[~inside].min())
        before = [span for span in spans if span[0] <= stray]
        if before:
            _, end, nearest = max(before, key=lambda span: span[0])
            where = f"{stray + size - end} bytes past the end"
        else:
            start, _, nearest = min(spans, key=lambda span: span[0])
            where = f"{start - stray} bytes before the start"
        shape = f"{str(nearest.dtype).removeprefix('torch.')}{list(nearest.shape)}"
        raise ContractError(f"{access}s {where} of {shape}")
