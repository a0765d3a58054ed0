"""``python -m harness serve``: a server of a shipped pair with sglang's HTTP interface."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from harness.core.argument_types import CommandLine, count, port
from harness.core.paths import MODELS
from harness.core.signals import held
from harness.errors import UsageError, rejected

if TYPE_CHECKING:
    import uvicorn

    from harness.server.engine_process.supervisor import Supervisor

CONTEXT_LENGTH = 512
SPECS = ("v1", "v2", "none")
KEEP_ALIVE_S = 30
BACKLOG = 1024
STOPPING = (signal.SIGINT, signal.SIGTERM)
PORT_REFUSED = (errno.EADDRINUSE, errno.EACCES)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = CommandLine(prog="specgate serve", description=__doc__)
    add = made.add_argument
    add("--pair", required=True, metavar="NAME", help="a folder of --models")
    add("--models", type=Path, default=MODELS, metavar="FOLDER", help="folder of the pairs")
    add("--host", default="127.0.0.1", help="IPv4 address of this machine to listen on")
    add("--port", type=port, default=0, metavar="N", help="to listen on; 0 takes a free one")
    add("--api-key", metavar="KEY", help="asked of every request but /health")
    add("--spec", choices=SPECS, default="v2", help="speculative worker; none for the target alone")
    add("--kernel", default="reference", metavar="NAME", help="attention kernel, such as xqa")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, …")
    add("--num-steps", type=count, default=3, metavar="N", help="draft steps per round")
    add("--num-draft-tokens", type=count, default=4, metavar="N", help="tokens per verify")
    add("--page-size", type=count, default=16, metavar="N", help="tokens per page")
    add("--num-pages", type=count, metavar="N", help="of each pool; by default enough for all")
    add("--max-running-requests", type=count, default=8, metavar="N", help="others wait")
    most = "most tokens of a prompt and its output"
    add("--context-length", type=count, default=CONTEXT_LENGTH, metavar="N", help=most)
    slow = "part of every step's time to add, an injected slowdown; 0.05 is 5 %%"
    add("--slowdown", type=float, default=0.0, metavar="PART", help=slow)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it; 2 for bad options or an engine that cannot start.

    A signal's exit code is 128 + its number.
    """
    commands = parser()
    asked = commands.parse_args(argv)
    try:
        _check(asked)
        with held(signal.SIGINT):
            server, supervisor = _server(asked)
        listener = _listen(asked.host, asked.port)
    except UsageError as error:
        commands.error(str(error))
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        ended = asyncio.run(_serve(server, supervisor, listener))
    except KeyboardInterrupt as interrupt:
        ended = signal.Signals(*interrupt.args or [signal.SIGINT])
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if isinstance(ended, signal.Signals):
        print(f"specgate serve: stopped by {ended.name}", file=sys.stderr)
        return 128 + ended
    return ended


def _interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def _check(asked: argparse.Namespace) -> None:
    """Check the options before anything is loaded.

    Raises:
        UsageError: naming the option, its value and what is accepted.
    """
    pairs = sorted(path.parent.parent for path in asked.models.glob("*/target/config.json"))
    if not pairs:
        accepted = "a folder with NAME/target/config.json"
        raise UsageError(rejected("--models", str(asked.models), accepted))
    if asked.pair not in (known := [folder.name for folder in pairs]):
        raise UsageError(rejected("--pair", asked.pair, ", ".join(known)))
    if not 0 <= asked.slowdown <= 10:
        raise UsageError(rejected("--slowdown", asked.slowdown, "0 … 10"))
    positions = _max_positions(asked.models / asked.pair / "target" / "config.json")
    if asked.context_length > positions:
        accepted = f"at most {positions}, the positions of {asked.pair}"
        raise UsageError(rejected("--context-length", asked.context_length, accepted))
    least = 1 + _pages_per_request(asked)
    if asked.num_pages is not None and asked.num_pages < least:
        accepted = f"at least {least}, enough for {asked.context_length} tokens"
        raise UsageError(rejected("--num-pages", asked.num_pages, accepted))


def _max_positions(path: Path) -> int:
    try:
        return int(json.loads(path.read_bytes())["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        accepted = "a JSON object with max_position_embeddings"
        raise UsageError(f"{path} is not accepted; accepted: {accepted}") from error


def _pages_per_request(asked: argparse.Namespace) -> int:
    tokens: int = asked.context_length + max(asked.num_draft_tokens, asked.num_steps)
    return -(-tokens // int(asked.page_size))


def _listen(host: str, number: int) -> socket.socket:
    """A listening socket.

    Raises:
        UsageError: the host is not this machine's, or the port cannot be listened on.
    """
    if not host:  # To the socket, that is every interface.
        accepted = "an IPv4 address of this machine; 0.0.0.0 for every interface"
        raise UsageError(rejected("--host", host, accepted))
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it, an answer
    # waits 40 ms for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, number))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in PORT_REFUSED:
            accepted = f"a port that can be listened on ({error.strerror}); 0 takes a free one"
            raise UsageError(rejected("--port", number, accepted)) from error
        accepted = f"an IPv4 address of this machine ({error.strerror})"
        raise UsageError(rejected("--host", host, accepted)) from error
    return listener


def _server(asked: argparse.Namespace) -> tuple[uvicorn.Server, Supervisor]:
    # Imported here: bad options are refused at once, and the engine process, which imports this
    # file, loads none of it.
    import uvicorn

    from harness.server.engine_process.messages import EngineOptions
    from harness.server.engine_process.supervisor import Supervisor
    from harness.server.http.app import create_app

    names = ("models", "pair", "spec", "kernel", "device", "num_steps", "num_draft_tokens")
    more = ("page_size", "max_running_requests", "context_length", "slowdown")
    num_pages = 1 + (asked.max_running_requests + 1) * _pages_per_request(asked)
    options = EngineOptions(
        num_pages=asked.num_pages or num_pages,
        **{name: getattr(asked, name) for name in (*names, *more)},
    )
    supervisor = Supervisor(options)
    app = create_app(
        supervisor, api_key=asked.api_key, start=supervisor.start, stop=supervisor.stop
    )
    config = uvicorn.Config(
        app, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    # By itself it raises a signal once more when it has shut down, which ends in a traceback.
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    return server, supervisor


async def _serve(
    server: uvicorn.Server, supervisor: Supervisor, listener: socket.socket
) -> signal.Signals | int:
    stopped: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        stopped.append(number)
        server.handle_exit(number, None)

    for number in STOPPING:
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (supervisor.healthy or supervisor.cannot_start or serving.done()):
        await asyncio.sleep(0.02)
    if supervisor.cannot_start:
        server.should_exit = True
    elif not serving.done():
        host, bound = listener.getsockname()
        print(f"serving http://{host}:{bound}", flush=True)
    await serving
    return stopped[0] if stopped else 2 if supervisor.cannot_start else 0


if __name__ == "__main__":
    sys.exit(main())
