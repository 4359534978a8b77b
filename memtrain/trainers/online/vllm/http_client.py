"""A question to a server, and its answer, or the reason that there is none. Never asked twice by itself."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

SHOWN = 300
"""Letters of an answer that are shown in a fault."""


class Unanswered(Exception):
    """The server did not answer, or with another answer than asked."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def ask(
    method: str, url: str, body: dict[str, Any] | None, timeout_s: float, *, key: str = ""
) -> dict[str, Any]:
    """The JSON object that a server answers; empty where it answers nothing. `key`: of its `--api-key`.

    Raises: Unanswered, with the HTTP status where there is one.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        shown = error.read().decode(errors="replace")[:SHOWN]
        raise Unanswered(f"{url}: {error.code} {error.reason}: {shown}", error.code) from None
    except (urllib.error.URLError, OSError) as error:
        raise Unanswered(f"{url}: {getattr(error, 'reason', error)}") from None
    try:
        found: object = json.loads(text) if text.strip() else {}
    except ValueError:
        raise Unanswered(f"{url}: the answer is not JSON: {text[:SHOWN]!r}") from None
    return found if isinstance(found, dict) else {"answer": found}
