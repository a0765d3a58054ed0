"""The commands of servers have the requested options, in flags of sglang 0.5.14."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.core.paths import MODELS
from harness.errors import UsageError
from harness.server.launch.process import ServerSpec, embedded
from harness.server.launch.sglang_command import sglang

PAIRS = ("gqa", "mla")
SPECULATIVE = (
    ("--speculative-algorithm", str, "EAGLE"),
    ("--speculative-draft-model-path", Path, None),
    ("--speculative-num-steps", int, 3),
    ("--speculative-eagle-topk", int, 1),
    ("--speculative-num-draft-tokens", int, 4),
)
VALUES = (
    ("--model-path", Path, None),
    ("--attention-backend", str, "triton"),
    ("--host", str, "127.0.0.1"),
    ("--port", int, None),
    ("--nccl-port", int, None),
    ("--context-length", int, 2048),
    ("--max-running-requests", int, 16),
    ("--cuda-graph-max-bs-decode", int, 16),
    ("--max-total-tokens", int, 20_000),
    ("--mem-fraction-static", float, 0.3),
    ("--random-seed", int, 0),
    ("--log-level", str, "warning"),
)
SWITCHES = ("--sleep-on-idle",)
BACKENDS = ("triton", "flashinfer", "fa3", "trtllm_mha", "trtllm_mla")


def of_pair(pair: str, **options: object) -> ServerSpec:
    target, draft = MODELS / pair / "target", MODELS / pair / "draft"
    given = {"target": target, "draft": draft, "attention_backend": "triton"} | options
    return sglang(**given)  # type: ignore[arg-type]


def parsed(argv: tuple[str, ...]) -> argparse.Namespace:
    """The flags of a command, none abbreviated and none unknown."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag, kind, _ in (*VALUES, *SPECULATIVE):
        parser.add_argument(flag, type=kind)
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(argv)


@pytest.mark.parametrize("pair", PAIRS)
def test_sglang_serves_a_pair(pair: str) -> None:
    spec = of_pair(pair)
    assert spec.argv[:3] == (sys.executable, "-m", "sglang.launch_server")
    found = parsed(spec.argv[3:])
    for flag, _, expected in (*VALUES, *SPECULATIVE):
        value = getattr(found, flag.removeprefix("--").replace("-", "_"))
        assert value is not None, flag
        assert expected in (None, value), flag
    assert found.sleep_on_idle
    assert (found.model_path / "config.json").is_file()
    assert (found.speculative_draft_model_path / "config.json").is_file()
    assert found.model_path != found.speculative_draft_model_path
    assert spec.url == f"http://127.0.0.1:{found.port}"
    assert found.port != found.nccl_port


def test_the_prefix_cache_stays_on() -> None:
    assert not any("radix" in word for word in of_pair("gqa").argv)


def test_servers_of_a_wave_have_ports_of_their_own() -> None:
    found = [parsed(of_pair("gqa").argv[3:]) for _ in range(6)]
    assert len({port for one in found for port in (one.port, one.nccl_port)}) == 12


def test_the_grpc_port_is_one() -> None:
    servers = [of_pair("gqa") for _ in range(4)]
    ports = {int(server.env["SGLANG_GRPC_PORT"]) for server in servers}
    assert len(ports) == len(servers)
    assert all(0 < port < 65_536 for port in ports)
    flags = [parsed(server.argv[3:]) for server in servers]
    others = {port for one in flags for port in (one.port, one.nccl_port)}
    assert not ports & others, "no server listens for gRPC on a port that it needs otherwise"


def test_kernels_of_sglang_are_compiled_whatever_these_suites_do_with_theirs() -> None:
    assert of_pair("gqa").env["TRITON_INTERPRET"] == "0"


def test_threads_of_sglang_are_as_many_as_asked_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert of_pair("gqa").env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    said = "who sets OMP_NUM_THREADS has it in the servers, too"
    assert of_pair("gqa").env["OMP_NUM_THREADS"] == "7", said


def test_without_a_draft_nothing_is_speculated() -> None:
    argv = of_pair("gqa", draft=None).argv
    assert not any("speculative" in word for word in argv)


@pytest.mark.parametrize(("num_steps", "most"), [(2, 3), (5, 6)])
def test_a_verify_accepts_at_most_its_steps_and_one(num_steps: int, most: int) -> None:
    """Whatever ``num_draft_tokens`` says: with topk 1 sglang verifies a token more than steps."""
    env = of_pair("gqa", num_steps=num_steps, accept_length=most).env
    assert env["SGLANG_SIMULATE_ACC_LEN"] == str(most)
    with pytest.raises(UsageError, match=f"at most {most}, with num_steps = {num_steps}"):
        of_pair("gqa", num_steps=num_steps, accept_length=most + 1)


def test_options_reach_sglang() -> None:
    spec = of_pair(
        "gqa",
        attention_backend="flashinfer",
        num_steps=2,
        num_draft_tokens=3,
        max_running_requests=5,
        context_length=512,
        python="/arm/bin/python",
        args=("--page-size", "16"),
    )
    assert spec.argv[0] == "/arm/bin/python"
    assert spec.argv[-2:] == ("--page-size", "16"), "the last of two flags wins"
    found = parsed(spec.argv[3:-2])
    assert found.attention_backend == "flashinfer"
    assert (found.speculative_num_steps, found.speculative_num_draft_tokens) == (2, 3)
    assert found.max_running_requests == found.cuda_graph_max_bs_decode == 5
    assert found.context_length == 512


@pytest.mark.parametrize(
    ("release", "renamed"),
    [("0.5.13", True), ("0.5.13.post2", True), ("0.5.14", False), ("0.6.0", False), (None, False)],
)
def test_a_release_is_given_the_flags_that_it_knows(release: str | None, renamed: bool) -> None:
    args = ("--disable-prefill-cuda-graph", "--page-size", "64")
    argv = of_pair("gqa", release=release, args=args).argv
    older = {"--cuda-graph-max-bs": "16", "--disable-piecewise-cuda-graph": "--page-size"}
    newer = {"--cuda-graph-max-bs-decode": "16", "--disable-prefill-cuda-graph": "--page-size"}
    for flags, are_there in ((older, renamed), (newer, not renamed)):
        for flag, follower in flags.items():
            assert (flag in argv) is are_there
            assert not are_there or argv[argv.index(flag) + 1] == follower


def test_options_reach_the_embedded_server() -> None:
    spec = embedded("mla", python="py", max_running_requests=3, api_key=None, slowdown=0.05)
    port = spec.url.rpartition(":")[2]
    assert spec.argv == (
        *("py", "-m", "harness", "serve", "--pair", "mla", "--port", port),
        *("--max-running-requests", "3", "--slowdown", "0.05"),
    )


@pytest.fixture(scope="module")
def server_args() -> ast.Module:
    """The table of flags in its sources, which are read and not imported."""
    found = find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("sglang is not installed: its sources are enough")
    path = Path(found.submodule_search_locations[0]) / "srt" / "server_args.py"
    return ast.parse(path.read_text(encoding="utf-8"))


def strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def test_sglang_has_every_flag(server_args: ast.Module) -> None:
    fields = {
        f"--{node.target.id.replace('_', '-')}"
        for found in server_args.body
        if isinstance(found, ast.ClassDef) and found.name == "ServerArgs"
        for node in found.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "no_cli" not in ast.dump(node.annotation)
    }
    flags = {flag for flag, *_ in (*VALUES, *SPECULATIVE)} | {*SWITCHES, "--disable-radix-cache"}
    assert len(fields) > 100
    assert flags - fields == set()


def test_sglang_has_every_backend(server_args: ast.Module) -> None:
    [choices] = (
        node.value
        for node in server_args.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "ATTENTION_BACKEND_CHOICES"
    )
    assert set(BACKENDS) <= set(strings(choices))
