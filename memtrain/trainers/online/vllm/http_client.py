"""A question to a server, and its answer, or the reason that there is none. Never asked twice by itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

SHOWN = 300
"""Letters of an answer that are shown in a fault."""

MOST_BYTES = 2**20
"""Bytes of an answer that carries no tokens. Taste."""

TOKEN_BYTES = 1024
"""Bytes by which one more token may make an answer longer: its number, its text with escapes, its log-prob.
Taste: vLLM 0.32 takes about a hundred."""

READ_BYTES = 2**16


class Unanswered(Exception):
    """The server did not answer, or with no JSON. `status`: of HTTP, where something did answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def ask(
    method: str,
    url: str,
    body: dict[str, Any] | None,
    timeout_s: float,
    *,
    key: str = "",
    num_tokens: int = 0,
) -> dict[str, Any]:
    """The JSON object that a server answers; empty where it answers nothing. `key`: of its `--api-key`.

    The whole answer must be there after `timeout_s`, however it drips, and be no longer than one of
    `num_tokens` tokens may be. No redirection is followed: neither prompts nor the key go to another place.

    Raises: Unanswered, with the HTTP status where there is one.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, data, headers, method=method)
    watch = _Watch(timeout_s)
    opener = urllib.request.build_opener(watch.http, watch.https, _NoRedirection)
    most = MOST_BYTES + num_tokens * TOKEN_BYTES
    try:
        with watch, opener.open(request, timeout=timeout_s) as answer:
            text = _read(answer, most)
        if watch.is_late:
            raise TimeoutError  # What was read up to the end of the connection is no whole answer.
    except urllib.error.HTTPError as error:
        raise Unanswered(f"{url}: {error.code} {error.reason}: {_said(error)}", error.code) from None
    except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
        # An answer that ends too early, a status line that is none, or a connection that the watch has ended.
        why = f"the answer was not whole after {timeout_s:g} s" if watch.is_late else _reason(error)
        raise Unanswered(f"{url}: {why}") from None
    try:
        found: object = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise Unanswered(f"{url}: the answer is not JSON: {text[:SHOWN]!r}", answer.status) from None
    return found if isinstance(found, dict) else {"answer": found}


def _read(answer: http.client.HTTPResponse, most: int) -> bytes:
    """The body. Raises: ValueError where it is longer than `most` bytes, or ends before its length."""
    parts: list[bytes] = []
    size = 0
    while part := answer.read(READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"the answer is longer than {most:,} bytes")
    if answer.length:
        raise ValueError(f"the answer ended {answer.length:,} bytes before its Content-Length")
    return b"".join(parts)


def _said(error: urllib.error.HTTPError) -> str:
    """The beginning of the text beside a status."""
    try:
        return error.read(SHOWN).decode(errors="replace")
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        return ""


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return (
        f"the answer is no HTTP: {error!r}" if isinstance(error, http.client.HTTPException) else str(reason)
    )


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Follow none: the status itself is the fault."""


class _Watch:
    """Ends the connections of a question when its time is over: a socket's timeout is one of each read."""

    def __init__(self, timeout_s: float) -> None:
        self.is_late = False
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        sockets = self._sockets

        class Plain(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        class Secured(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        class Http(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Plain, req)

        class Https(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Secured, req)

        self.http, self.https = Http, Https

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.is_late = True
        for one in self._sockets:
            # An encrypted connection's own shutdown would wait for the other side. It may have ended.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(one, socket.SHUT_RDWR)
