"""Runs a server: signals, warnings, the status line on the terminal, and graceful shutdown."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from llamarium.engine.tiers.disk_tier import DiskUse
from llamarium.server.app import Extension, create_app
from llamarium.server.hosts import address
from llamarium.server.http.access import Log
from llamarium.server.http.protocol import connection_class
from llamarium.server.lifecycle.service import Service
from llamarium.server.lifecycle.threads import are_at_work, in_own_thread
from llamarium.system import STOP_SIGNALS

_LOOK_S = 0.05  # interval between checks of the engine's state
_BREAKING_S = 0.5  # time for clients to receive the errors of a failed engine
_BITS = {
    True: "logits do not depend on other requests",
    False: "logits may differ in the last bits when other requests run",
}
"""Log texts for the values of `Runner.is_row_exact`."""
_CLOSING_S = 2  # time for connections to send buffered data
_DROPPED_S = 60.0  # minimum interval between log lines about dropped blocks
_SHOWN_S = 0.5  # interval between updates of the status line


def run(service: Service, names: tuple[str, ...], listener: socket.socket, extensions: Sequence[Extension] = ()) -> int:
    """Serve until a signal arrives, and return the exit code.

    Args:
        service: The model, which may still be loading.
        names: The model's served names.
        listener: The listening socket.
        extensions: Add further routes.

    Raises:
        Exception: The error with which loading has failed.
    """
    log = Log(service.settings.log_format)
    config = uvicorn.Config(
        create_app(service, names, log, extensions),
        http=connection_class(service.settings),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_CLOSING_S,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the server logs the same events itself
    server = Server(config, service, log)
    log.event(f"listening at {address(service.settings, listener)}", model=names[0])
    try:
        server.run(sockets=[listener])
    finally:
        if service.settings.uds is not None:
            Path(service.settings.uds).unlink(missing_ok=True)
    if service.loading.failure is not None:
        raise service.loading.failure
    if service.loading.is_running or are_at_work():  # these threads cannot be stopped
        sys.stderr.flush()
        os._exit(server.exit_code)
    return server.exit_code


class Server(uvicorn.Server):
    """uvicorn's server, with its own handling of signals and shutdown."""

    def __init__(self, config: uvicorn.Config, service: Service, log: Log) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._service = service
        self._log, self._live = log, StatusLine(service, log)
        self._watcher: asyncio.Task[None] | None = None
        self._knows_full_record = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections and watching the engine."""
        await super().startup(sockets)
        self._watcher = asyncio.create_task(self._watch())

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle SIGINT and SIGTERM, on Windows also SIGBREAK, while the body runs."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining on the first signal; exit immediately on the second one."""
        if self._service.is_draining:
            os._exit(128 + sig)
        self._service.is_draining = True
        self.exit_code = 130 if sig == signal.SIGINT else 0

    async def _watch(self) -> None:
        """Stop the server after a signal, or when loading or the engine has failed."""
        try:
            await self._until_the_end()
        finally:
            self.should_exit = True

    async def _until_the_end(self) -> None:
        service = self._service
        is_logged, failure, dropped = False, "", DroppedBlocks(self._log)
        while (state := service.state) in ("loading", "ready"):
            if state == "ready" and not is_logged:
                is_logged = True
                model, _ = service.require()
                runner = f"runner: {model.runner.name}, {_BITS[model.runner.is_row_exact]}"
                took = f"ready after {service.loading.seconds:.2f} s"
                self._log.event(f"{took}; {runner}", max_context=service.max_tokens)
            disk = service.loaded and service.loaded[1].disk_use
            before, failure = failure, disk.failure if disk else ""
            if failure and not before:
                self._log.event(f"warning: the prefix cache on disk cannot be written; no blocks are kept: {failure}")
            dropped.look(disk)
            self._look_at_record()
            self._live.show()
            await asyncio.sleep(_LOOK_S)
        self._log.status("")
        if service.state == "broken":
            self.exit_code = 1
            self._log.event("the engine failed" if service.loaded else "the server failed to start")
            await asyncio.sleep(_BREAKING_S)
        else:
            await self._drain()

    def _look_at_record(self) -> None:
        """Log once that the record of answers is full."""
        recorder = self._service.settings.recorder
        if recorder is not None and recorder.is_full and not self._knows_full_record:
            self._knows_full_record = True
            self._log.event("warning: the record of answers is full; nothing more is recorded")

    async def _drain(self) -> None:
        service, limit_s, num_answers = self._service, self._service.settings.drain_timeout_s, self._service.in_flight
        waits = f" (waits up to {limit_s:g} s; a second signal stops at once)" if num_answers else ""
        self._log.event(f"stopping; running answers: {num_answers}{waits}")
        end = time.monotonic() + limit_s
        while service.in_flight and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        if service.state == "broken":
            self.exit_code = 1
            self._log.event("the engine failed")
        await in_own_thread(service.close)


class DroppedBlocks:
    """Logs blocks that were not written to the prefix cache on disk, at most once a minute."""

    def __init__(self, log: Log) -> None:
        self._log, self._num_logged, self._next_s = log, 0, 0.0

    def look(self, disk: DiskUse | None) -> None:
        """Log the number of blocks dropped since the last log line, if any."""
        now, dropped = time.monotonic(), 0 if disk is None else disk.num_dropped - self._num_logged
        if disk is not None and dropped > 0 and now >= self._next_s:
            why = disk.failure or "the disk is too slow, or memory ran out"
            self._log.event("warning: the prefix cache on disk dropped blocks", blocks=dropped, reason=why)
            self._num_logged, self._next_s = disk.num_dropped, now + _DROPPED_S


class StatusLine:
    """The status line on the terminal: running and waiting sequences, tokens per second, and KV cache usage."""

    def __init__(self, service: Service, log: Log) -> None:
        self._service, self._log = service, log
        self._next_s = 0.0
        self._last = (0.0, 0)  # time of the last update, and the number of tokens generated by then

    def show(self) -> None:
        """Update the line at most twice a second, if stderr is a terminal."""
        now = time.monotonic()
        if now >= self._next_s and self._log.shows_status:
            self._next_s = now + _SHOWN_S
            self._log.status(self._text(now))

    def _text(self, now: float) -> str:
        if self._service.loaded is None:
            done, total = self._service.loading.progress
            return f"loading {100 * done // total if total else 0} %"
        snapshot = self._service.loaded[1].snapshot
        before_s, before = self._last
        self._last = now, snapshot.counts.generated_tokens
        rate = (snapshot.counts.generated_tokens - before) / (now - before_s)
        share = 100 * snapshot.used_blocks / snapshot.num_blocks
        return f"{snapshot.running} running, {snapshot.waiting} waiting, {rate:.0f} tokens/s, cache {share:.0f} %"
