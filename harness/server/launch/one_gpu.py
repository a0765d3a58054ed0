"""``PYTHON one_gpu.py TP_SIZE WORDS…``: an sglang server whose ranks share one GPU.

Each rank is launched as a node of its own, whose only GPU is the first; rank 0 answers requests.
What tensor parallelism computes is then seen on a machine with one GPU. How fast it is, is not:
without CUDA's Multi-Process Service the ranks take turns. NCCL lets ranks share a GPU since 2.30
(``NCCL_MULTI_RANK_GPU_ENABLE``); ``SPECGATE_NCCL`` names a library to take instead of torch's.

Standard library alone, since the interpreter is the server's.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

LIBRARY, LEAST, POLL_S = "SPECGATE_NCCL", 23000, 0.2
"""The least version as NCCL writes it: 2.30.0."""


def command(python: str, tp_size: int, argv: Sequence[str]) -> tuple[str, ...]:
    """The words that run ``python WORDS…`` like that, from any folder."""
    return (python, __file__, str(tp_size), *argv)


def ranks(
    tp_size: int, words: Sequence[str], address: str, ports: Sequence[int]
) -> list[list[str]]:
    """Commands of all ranks, without the interpreter.

    Args:
        tp_size: how many.
        words: of a server with one rank; flags that come later win.
        address: where the ranks meet, "HOST:PORT".
        ports: where ranks after the first say that they are healthy, ``tp_size - 1`` of them.
    """
    shared = ["--tp-size", str(tp_size), "--nnodes", str(tp_size), "--dist-init-addr", address]
    # Which would copy from one GPU to another.
    shared.append("--disable-custom-all-reduce")
    own = [[], *(["--port", str(port)] for port in ports)]
    return [[*words, *shared, "--node-rank", str(n), *more] for n, more in enumerate(own)]


def library(environment: Mapping[str, str]) -> Path:
    """NCCL's: the one that is named, or the one that torch's distribution brings."""
    if named := environment.get(LIBRARY):
        return Path(named)
    found = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    [folder] = (found and found.submodule_search_locations) or ["nvidia/nccl"]
    return Path(folder, "lib", "libnccl.so.2")


def version(path: Path) -> int:
    """Of NCCL, 23003 is 2.30.3; 0 where there is none that can be loaded."""
    number = ctypes.c_int(0)
    try:
        ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return 0
    return number.value


def main(argv: Sequence[str]) -> int:
    """Exit code of the first rank that ends; the others are ended with it."""
    tp_size, words = int(argv[0]), argv[1:]
    path = library(os.environ)
    if (found := version(path)) < LEAST:
        accepted = f"{LEAST} or newer, whose ranks may share a GPU; {LIBRARY} names its file"
        print(f"specgate: NCCL of {path} = {found} is not accepted; accepted: {accepted}")
        return 2
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(tp_size)]
    meet, *ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "LD_PRELOAD": str(path)}
    commands = ranks(tp_size, words, f"127.0.0.1:{meet}", ports)
    environment = os.environ | shared
    started = [subprocess.Popen([sys.executable, *one], env=environment) for one in commands]
    try:
        while all(one.poll() is None for one in started):
            time.sleep(POLL_S)
        return next(code for one in started if (code := one.poll()) is not None)
    finally:
        for rank in started:
            rank.terminate()
        for rank in started:
            rank.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
