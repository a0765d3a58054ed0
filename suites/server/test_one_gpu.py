"""Ranks of a server on one GPU: each is a node, all meet at one address, all end together."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from harness.core.paths import MODELS
from harness.server.launch import one_gpu
from harness.server.launch.sglang_command import sglang

RANK = """
import json, os, pathlib, sys, time
rank = sys.argv[sys.argv.index("--node-rank") + 1]
seen = {"argv": sys.argv[1:], "nccl": os.environ["NCCL_MULTI_RANK_GPU_ENABLE"], "pid": os.getpid()}
path = pathlib.Path(sys.argv[1], rank)
path.with_suffix(".part").write_text(json.dumps(seen))
path.with_suffix(".part").rename(path)
if rank == "2":
    while len([*path.parent.iterdir()]) < 3:
        time.sleep(0.01)
    sys.exit(7)
time.sleep(120)
"""


def last(argv: list[str], flag: str) -> str:
    """What an argument parser makes of a flag that may come twice."""
    return argv[len(argv) - argv[::-1].index(flag)]


def test_every_rank_is_a_node_and_all_end_with_the_first(tmp_path, monkeypatch):
    free, create = [], socket.create_server

    def noted(address):
        made = create(address)
        free.append(str(made.getsockname()[1]))
        return made

    monkeypatch.setattr(socket, "create_server", noted)
    library = "libm.so.6"  # one that can be loaded anywhere
    least = 23000  # NCCL 2.30.0, the first whose ranks may share a GPU
    monkeypatch.setattr(one_gpu, "version", {Path(library): least}.__getitem__)
    monkeypatch.setenv(one_gpu.LIBRARY, library)
    rank, seen = tmp_path / "rank.py", tmp_path / "seen"
    rank.write_text(RANK)
    seen.mkdir()
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")  # as on a host that forbids it otherwise
    ended = one_gpu.main(["3", str(rank), str(seen), "--port", "1234"])
    assert ended == 7, f"NCCL {least} serves, and the first rank's end is the command's: {ended}"
    told = [json.loads((seen / str(n)).read_text()) for n in range(3)]
    words = [one["argv"] for one in told]
    assert [last(one, "--node-rank") for one in words] == ["0", "1", "2"]
    for flag, value in (("--tp-size", "3"), ("--nnodes", "3")):
        assert {last(one, flag) for one in words} == {value}
    assert len({last(one, "--dist-init-addr") for one in words}) == 1
    ports = [last(one, "--port") for one in words]
    assert ports[0] == "1234"
    meet = last(words[0], "--dist-init-addr").partition(":")[2]
    assert len({*ports, meet}) == 4
    said = "ranks meet, and tell that they are healthy, at ports that the kernel had free"
    assert {meet, *ports[1:]} == {*free}, f"{said}, {free}: {meet}, {ports[1:]}"
    said = "ranks that were asked to share a GPU may, whatever the environment says"
    assert {one["nccl"] for one in told} == {"1"}, said


@pytest.mark.parametrize("found", [0, 22809])
def test_a_library_whose_ranks_need_a_gpu_each_is_refused(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(one_gpu, "version", lambda path: found)
    monkeypatch.setenv(one_gpu.LIBRARY, "/elsewhere/libnccl.so.2")
    assert one_gpu.main(["2", str(tmp_path / "no_server.py")]) == 2
    line = f"specgate: NCCL of /elsewhere/libnccl.so.2 = {found} is not accepted; accepted: 23000"
    assert capsys.readouterr().out.startswith(line)


def test_what_is_no_library_has_no_version(tmp_path):
    (tmp_path / "text").write_text("no library")
    assert [one_gpu.version(tmp_path / name) for name in ("text", "none")] == [0, 0]
    assert one_gpu.library({one_gpu.LIBRARY: "/a/b.so"}) == Path("/a/b.so")
    assert one_gpu.library({}).parts[-3:] == ("nccl", "lib", "libnccl.so.2")


def test_the_command_of_a_server():
    pair = {"target": MODELS / "gqa/target", "draft": None, "attention_backend": "triton"}
    argv = sglang(**pair, tp_size=2, is_on_one_gpu=True, python="/env/bin/python").argv
    script = Path(argv[1])
    assert argv[0] == "/env/bin/python"
    assert script.is_file()
    assert argv[2:5] == ("2", "-m", "sglang.launch_server")
    assert "--tp-size" not in argv
    assert "--tp-size" in sglang(**pair, tp_size=2).argv


def test_it_needs_neither_this_project_nor_torch(tmp_path):
    pair = {"target": tmp_path, "draft": None, "attention_backend": "triton"}
    argv = sglang(**pair, tp_size=2, is_on_one_gpu=True).argv
    alone = subprocess.run(
        [argv[0], "-I", *argv[1:]], cwd=tmp_path, env={one_gpu.LIBRARY: "/no"}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (alone.returncode, alone.stderr) == (2, "")
