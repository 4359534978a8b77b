"""A teacher behind vLLM's OpenAI-compatible server: the likeliest tokens at every place of a row.

The server scores the tokens of a prompt (`prompt_logprobs`): for each place but the first the log-probs of
the K likeliest tokens, at temperature 1, and that of the token which stands there. What all others have
together is 1 less their sum, which float32 log-probs tell to some 1e-7 of mass.
"""

# T tokens of a row, n = T - 1 places, K tokens that are kept

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np

from memtrain.errors import LaunchError
from memtrain.trainers.data.store.top_k import Likely
from memtrain.trainers.online.vllm.answers import (
    NO_PROBABILITY,
    ROUNDING,
    Impossible,
    fields,
    items,
    logprob,
    shown,
    whole,
)
from memtrain.trainers.online.vllm.http_client import Unanswered, ask

KEY = "VLLM_API_KEY"
"""Environment variable of the server's key, as vLLM names it."""

LEAST_TAIL = 1e-7
"""Mass of the tokens that were cut off, where 1 less the others' says less: what float32 log-probs of a mass
near 1 can tell. Without it a token that has all mass would make a reverse divergence infinite."""

MASS_ROUNDING = 1e-2
"""Mass above 1 that rounding gives the likeliest tokens together, in bfloat16 at most. Taste."""

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
        answer = _asked(
            "POST",
            f"{self.address}/v1/completions",
            body,
            self.place,
            num_tokens=len(ids) * (self.top_k + 1),
        )
        try:
            choices = items(answer.get("choices"), "choices")
            first = fields(choices[0] if choices else None, "the first choice")
            places = items(first.get("prompt_logprobs"), "prompt_logprobs")
            if len(places) != len(ids):
                raise Impossible(
                    f"prompt_logprobs of {len(places):,} tokens came, and {len(ids):,} were sent"
                )
        except Impossible as error:
            raise LaunchError(
                f"the server {self.address} answers without prompt_logprobs of the {len(ids):,} tokens asked "
                f"({error})",
                self.place,
                "start it with vLLM (vllm serve MODEL --max-logprobs K), which has them",
            ) from None
        kept = min(self.top_k, self.num_columns)
        found = Likely(
            np.zeros((len(ids) - 1, kept), np.int32),
            np.zeros((len(ids) - 1, kept), np.float32),
            np.zeros(len(ids) - 1, np.float32),
        )
        for number, entry in enumerate(places[1:]):
            self._take(entry, found, number, kept, own=ids[number + 1])
        return found

    def _take(self, entry: object, found: Likely, number: int, kept: int, own: int) -> None:
        """Put one place's tokens into their row, likeliest first. `own`: the token that stands there."""
        try:
            ranked = sorted(_ranked(token, one) for token, one in fields(entry, "a place").items())
            if own not in [token for _, token, _ in ranked]:
                raise Impossible(f"the token {own} that was sent is not among those of its place")
        except Impossible as error:
            raise LaunchError(
                f"the server {self.address} answers in another form than vLLM: {error}",
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
        mass = math.fsum(math.exp(logp) for _, logp in best)
        falls = all(one[1] >= other[1] - ROUNDING for one, other in pairwise(best))
        if mass > 1 + MASS_ROUNDING or not falls:
            what = (
                f"a probability of {mass:.4g} together" if falls else "ranks that their log-probs do not have"
            )
            raise LaunchError(
                f"the server {self.address} gives the {kept} likeliest tokens {what}",
                self.place,
                "use a server whose prompt_logprobs are those at temperature 1",
            )
        found.ids_nK[number] = [token for token, _ in best]
        found.logps_nK[number] = [logp for _, logp in best]
        is_whole = kept == self.num_columns
        found.tail_n[number] = -math.inf if is_whole else math.log(max(1.0 - mass, LEAST_TAIL))


def _ranked(token: str, one: object) -> tuple[int, int, float]:
    """(rank, id, log-prob) of a token. Raises: Impossible."""
    given = fields(one, f"the token {shown(token)}")
    if not re.fullmatch("[0-9]{1,9}", token):
        raise Impossible(f"a token is {shown(token)}")
    rank = whole(given.get("rank"), "a rank")
    if rank < 1:
        raise Impossible(f"a rank is {rank}")
    return rank, int(token), _teachers_logprob(given.get("logprob"))


def _teachers_logprob(value: object) -> float:
    """A log-prob of a token that nobody drew: minus infinity comes as -9999. Raises: Impossible."""
    return NO_PROBABILITY if value == NO_PROBABILITY else logprob(value)


def find_server(address: str, teacher: str, *, top_k: int, num_columns: int, place: str) -> TeacherServer:
    """The server at an address, with the name by which it holds the teacher.

    Raises: LaunchError when it does not answer, or holds other models.
    """
    address = address.rstrip("/").removesuffix("/v1")
    listed = _asked("GET", f"{address}/v1/models", None, place).get("data")
    entries: list[Any] = cast(list[Any], listed) if isinstance(listed, list) else []
    roots = {
        str(one.get("id")): {str(one.get("id")), str(one.get("root"))}
        for one in entries
        if isinstance(one, Mapping)
    }
    name = next((name for name, known in roots.items() if teacher in known), None)
    if name is None:
        has = ", ".join(roots) or "none"
        raise LaunchError(
            f"the server {address} does not serve {teacher}: its models are {has}",
            place,
            "set teacher to the model that it serves, or start it with that one",
        )
    return TeacherServer(address, name, top_k, num_columns, place)


def _asked(
    method: str, url: str, body: dict[str, Any] | None, place: str, *, num_tokens: int = 0
) -> dict[str, Any]:
    try:
        return ask(method, url, body, PATIENCE_S, key=os.environ.get(KEY, ""), num_tokens=num_tokens)
    except Unanswered as error:
        fix = "start it: vllm serve MODEL --max-logprobs K; or correct the address"
        if error.status in (401, 403):
            fix = f"set {KEY} in the environment"
        elif error.status == 400:
            fix = "lower top_k to the server's --max-logprobs, or length.max_length below its --max-model-len"
        raise LaunchError(f"the teacher's server does not answer: {error}", place, fix) from None
