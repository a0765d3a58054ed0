"""``python -m harness serve``: a shipped pair behind sglang's HTTP interface, on the loopback."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.core.argument_types import count
from harness.core.paths import MODELS

CONTEXT_LENGTH = 512
KEEP_ALIVE_S = 30
BACKLOG = 1024


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="specgate serve", description=__doc__)
    made.add_argument("--pair", required=True, metavar="NAME", help="a folder of --models")
    made.add_argument("--models", type=Path, default=MODELS, metavar="FOLDER")
    made.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
    made.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    made.add_argument("--api-key", metavar="KEY", help="asked of every request but /health")
    made.add_argument("--spec", choices=("v1", "v2", "none"), default="v2")
    made.add_argument("--kernel", default="reference", metavar="NAME")
    made.add_argument("--device", default="cpu", metavar="NAME")
    made.add_argument("--num-steps", type=count, default=3, metavar="N")
    made.add_argument("--num-draft-tokens", type=count, default=4, metavar="N")
    made.add_argument("--page-size", type=count, default=16, metavar="N")
    made.add_argument("--num-pages", type=count, metavar="N", help="by default, room for all")
    made.add_argument("--max-running-requests", type=count, default=8, metavar="N")
    made.add_argument("--context-length", type=count, default=CONTEXT_LENGTH, metavar="N")
    made.add_argument("--slowdown", type=float, default=0.0, metavar="PART")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; 2 for a command line that makes no sense, or makes no engine."""
    commands = parser()
    asked = commands.parse_args(argv)
    if not (asked.models / asked.pair / "target" / "config.json").is_file():
        configs = asked.models.glob("*/target/config.json")
        known = sorted(path.parent.parent.name for path in configs)
        commands.error(f"--pair = {asked.pair!r} is not accepted; accepted: {', '.join(known)}")
    if not 0 <= asked.slowdown <= 10:
        commands.error(f"--slowdown = {asked.slowdown} is not accepted; accepted: 0 … 10")
    # Behind the checks, so that a mistake is answered at once; and the engine's process, which
    # imports this file, loads none of it.
    from harness.server.engine_process.messages import Options

    names = ("models", "pair", "spec", "kernel", "device", "num_steps", "num_draft_tokens")
    more = ("page_size", "max_running_requests", "context_length", "slowdown")
    pages_a_request = -(-(asked.context_length + asked.num_draft_tokens) // asked.page_size)
    room = 1 + (asked.max_running_requests + 1) * pages_a_request
    least = 1 + pages_a_request
    if asked.num_pages is not None and asked.num_pages < least:
        accepted = f"at least {least}, enough for {asked.context_length} tokens"
        commands.error(f"--num-pages = {asked.num_pages} is not accepted; accepted: {accepted}")
    options = Options(
        num_pages=asked.num_pages or room,
        **{name: getattr(asked, name) for name in (*names, *more)},
    )
    return asyncio.run(_serve(options, asked.host, asked.port, asked.api_key))


async def _serve(options: object, host: str, port: int, api_key: str | None) -> int:
    import uvicorn

    from harness.server.engine_process.messages import Options
    from harness.server.engine_process.supervisor import Supervisor
    from harness.server.http.app import create_app

    assert isinstance(options, Options)
    supervisor = Supervisor(options)
    app = create_app(supervisor, api_key=api_key, start=supervisor.start, stop=supervisor.stop)
    listener = _listen(host, port)
    bound = listener.getsockname()[1]
    config = uvicorn.Config(
        app, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (supervisor.healthy or supervisor.cannot_start or serving.done()):
        await asyncio.sleep(0.02)
    if supervisor.cannot_start:
        server.should_exit = True
    elif not serving.done():
        print(f"serving http://{host}:{bound}", flush=True)
    await serving
    return 2 if supervisor.cannot_start else 0


def _listen(host: str, port: int) -> socket.socket:
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it, an answer
    # waits 40 ms for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    return listener


if __name__ == "__main__":
    sys.exit(main())
