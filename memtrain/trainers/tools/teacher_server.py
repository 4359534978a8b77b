"""A teacher behind vLLM's OpenAI-compatible server: the likeliest tokens at every place of a row.

The server scores the tokens of a prompt (`prompt_logprobs`): for each place but the first the log-probs of
the K likeliest tokens, at temperature 1, and that of the token which stands there. What all others have
together is 1 less their sum, which float32 log-probs tell to some 1e-7 of mass.
"""

# T tokens of a row, n = T - 1 places, K tokens that are kept

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from memtrain.errors import LaunchError
from memtrain.trainers.data.store.top_k import Likely
from memtrain.trainers.online.vllm.http_client import Unanswered, ask

KEY = "VLLM_API_KEY"
"""Environment variable of the server's key, as vLLM names it."""

LEAST_TAIL = 1e-7
"""Mass of the tokens that were cut off, where 1 less the others' says less: what float32 log-probs of a mass
near 1 can tell. Without it a token that has all mass would make a reverse divergence infinite."""

PATIENCE_S = 600.0
"""Wait for one answer: a row may stand behind others of the server."""


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """A server that was found to hold a model."""

    address: str
    model: str
    """Name by which the server has it."""
    top_k: int
    num_columns: int
    """Tokens of the vocabulary over which the distribution is."""
    place: str
    """Key of the recipe that names the server."""

    def likely(self, ids: Sequence[int]) -> Likely:
        """The likeliest tokens at places 1 to T - 1 of a row: n of them.

        Raises: LaunchError when the server does not answer, or not with all of them.
        """
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.top_k,
        }
        answer = _asked("POST", f"{self.address}/v1/completions", body, self.place)
        choices = answer.get("choices")
        first: Any = choices[0] if isinstance(choices, list) and choices else {}
        places = first.get("prompt_logprobs") if isinstance(first, Mapping) else None
        if not isinstance(places, list) or len(cast(list[Any], places)) != len(ids):
            raise LaunchError(
                f"the server {self.address} answers without prompt_logprobs of the {len(ids):,} tokens asked",
                self.place,
                "start it with vLLM (vllm serve MODEL --max-logprobs K), which has them",
            )
        kept = min(self.top_k, self.num_columns)
        found = Likely(
            np.zeros((len(ids) - 1, kept), np.int32),
            np.zeros((len(ids) - 1, kept), np.float32),
            np.zeros(len(ids) - 1, np.float32),
        )
        for number, entry in enumerate(cast(list[Any], places)[1:]):
            self._take(entry, found, number, kept)
        return found

    def _take(self, entry: Any, found: Likely, number: int, kept: int) -> None:
        """Put one place's tokens into their row, likeliest first."""
        try:
            ranked = sorted(
                (int(one["rank"]), int(token), float(one["logprob"])) for token, one in entry.items()
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise LaunchError(
                f"the server {self.address} answers in another form than vLLM: {str(entry)[:200]}",
                self.place,
                "use a server with vLLM's prompt_logprobs",
            ) from None
        best = [(token, logp) for rank, token, logp in ranked if rank <= kept][:kept]
        if len(best) < kept:
            raise LaunchError(
                f"the server {self.address} gives {len(best)} top-k tokens, but top_k is {self.top_k}",
                self.place,
                f"start it with --max-logprobs {self.top_k}, or lower top_k and make the file again",
            )
        if max(token for token, _ in best) >= self.num_columns:
            raise LaunchError(
                f"the server {self.address} has tokens beyond the {self.num_columns:,} of the student",
                self.place,
                "use a teacher and a student of one family",
            )
        found.ids_nK[number] = [token for token, _ in best]
        found.logps_nK[number] = [logp for _, logp in best]
        rest = 1.0 - math.fsum(math.exp(logp) for _, logp in best)
        is_whole = kept == self.num_columns
        found.tail_n[number] = -math.inf if is_whole else math.log(max(rest, LEAST_TAIL))


def find_server(address: str, teacher: str, *, top_k: int, num_columns: int, place: str) -> TeacherServer:
    """The server at an address, with the name by which it holds the teacher.

    Raises: LaunchError when it does not answer, or holds other models.
    """
    address = address.rstrip("/").removesuffix("/v1")
    listed = _asked("GET", f"{address}/v1/models", None, place).get("data")
    entries = cast(list[dict[str, Any]], listed if isinstance(listed, list) else [])
    roots = {str(one.get("id")): {str(one.get("id")), str(one.get("root"))} for one in entries}
    name = next((name for name, known in roots.items() if teacher in known), None)
    if name is None:
        has = ", ".join(roots) or "none"
        raise LaunchError(
            f"the server {address} does not serve {teacher}: its models are {has}",
            place,
            "set teacher to the model that it serves, or start it with that one",
        )
    return TeacherServer(address, name, top_k, num_columns, place)


def _asked(method: str, url: str, body: dict[str, Any] | None, place: str) -> dict[str, Any]:
    try:
        return ask(method, url, body, PATIENCE_S, key=os.environ.get(KEY, ""))
    except Unanswered as error:
        fix = "start it: vllm serve MODEL --max-logprobs K; or correct the address"
        if error.status in (401, 403):
            fix = f"set {KEY} in the environment"
        elif error.status == 400:
            fix = "lower top_k to the server's --max-logprobs, or length.max_length below its --max-model-len"
        raise LaunchError(f"the teacher's server does not answer: {error}", place, fix) from None
