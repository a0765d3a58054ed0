"""The GPU's clock in a kernel, also in Triton's interpreter, where Triton's own reading fails."""

import triton
import triton.language as tl


# Impure, so that every reading stays where it is written: none is hoisted, no two become one.
@triton.jit
def globaltimer():  # type: ignore[no-untyped-def]
    """Nanoseconds, int64."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
