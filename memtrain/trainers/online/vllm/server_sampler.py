"""Sampling by a vLLM server that somebody else started: HTTP, token ids in and out, a checkpoint a rollout.

Of a stock server only what it offers in its development mode is used: /collective_rpc to load a checkpoint,
/reset_prefix_cache, /update_weight_version and /weight_info to know which weights it holds. Without these it
cannot be given new weights, and training on its completions is refused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.trainers.online.generation.progress import Progress
from memtrain.trainers.online.generation.protocol import Group, OnDone, Sample, Sampler, Sampling
from memtrain.trainers.online.vllm.answers import (
    Asked,
    Impossible,
    choices_of,
    fields,
    items,
    of_choice,
    shown,
)
from memtrain.trainers.online.vllm.http_client import Unanswered, ask
from memtrain.trainers.online.vllm.sampler import SEED_BITS, sampling_arguments, vocab_size
from memtrain.trainers.online.vllm.weight_check import CANARY_SAMPLING, canary_group, difference
from memtrain.trainers.online.vllm.weight_sync import vllm_weights
from memtrain.trainers.runtime.atomic_files import disk_fault, system_errors
from memtrain.trainers.runtime.own_trees import remove_half_written
from memtrain.trainers.runtime.ranks import Ranks

AT_ONCE = 64
"""Groups that are asked for at a time; the server queues the rest. Taste."""

SHARD_BYTES = 2 * 2**30
"""Bytes of one file of a checkpoint: so much is held beside the weights while it is written."""

WAIT_S = 1.0
"""Between two looks at a server that does not answer."""

DEV_MODE = (
    "start it with VLLM_SERVER_DEV_MODE=1 (vLLM 0.32: python -m vllm.entrypoints.openai.api_server), in a "
    "private network; or set generate.vllm.python for a process of the run's own"
)


class Stale(Exception):
    """The server does not hold the given weights: most often it was started again."""


@dataclass(slots=True)
class ServerSampler:
    """Samples with a server. Only the main rank gives it weights; each rank asks for its own groups."""

    model: PreTrainedModel | PeftModel
    address: str
    folder: Path
    """Folder of checkpoints; the server sees it under the same path."""
    version: Callable[[], int]
    """Grows whenever the weights change."""
    ranks: Ranks
    emit: Callable[[str], None]
    deadline_s: float
    start_deadline_s: float
    restarts: int
    fallback: Callable[[], Sampler] | None
    has_logprobs: bool = True
    limit: float | None = None
    """Mean difference of log-probs above which it has other weights than it was given; None: any."""
    name: str = "vllm_server"
    served: str | None = None
    """The server's name of the model."""
    held: int | None = None
    room: int | None = None
    """Tokens of a prompt with its completion that it takes; None: it does not say."""
    mark: str = ""
    """Server's name for the weights that it was given last."""
    is_given_up: bool = False
    made: list[Path] = field(default_factory=list)
    """Checkpoints that were written into the folder, which may hold others' files."""

    def generate(
        self, groups: Sequence[Group], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[list[Sample]]:
        """The completions of each group, in order, with the weights as they are now.

        Raises: LaunchError when the server cannot be given weights, or fails more often than it may.
        """
        progress = Progress(groups, on_done)
        faults: list[str] = []
        while not self.is_given_up:
            try:
                self._prepare(groups)
                self._write(progress, sampling)
                break
            except (Unanswered, Stale, Impossible) as fault:
                self.held = None
                faults.append(str(fault))
                self._go_on_or_give_up(faults, missing=len(progress.missing))
        if self.is_given_up:
            assert self.fallback is not None, "Given up with somebody to go on."
            progress.finish_with(self.fallback(), sampling)
        return progress.in_order()

    def close(self) -> None:
        """Remove the checkpoints; the server, and what others have in the folder, is left as it is."""
        if not self.ranks.is_main:
            return
        for path in self.made:
            remove_half_written(path)
        with suppress(OSError):
            self.folder.rmdir()

    def _prepare(self, groups: Sequence[Group]) -> None:
        """A server that holds the weights of now."""
        if self.served is None:
            self._look_at_server(groups)
        if self.held == self.version() and self._mark_of_server() == self.mark:
            return
        if self.ranks.world > 1 and self.held == self.version():
            raise LaunchError(
                f"the server at {self.address} was restarted, and {self.ranks.world} processes use it",
                "generate.vllm.server",
                "run the same command again: the run resumes from its last checkpoint",
            )
        if self.ranks.is_main:
            self._give_weights()
        self.mark = self.ranks.broadcast(self.mark)
        self.held = self.version()
        if self.limit is not None and groups and self.ranks.is_main:
            self._check_weights(groups, self.limit)

    def _look_at_server(self, groups: Sequence[Group]) -> None:
        until = time.monotonic() + self.start_deadline_s
        while True:
            try:
                answer = self._ask("GET", "/v1/models")
                break
            except Unanswered as fault:
                # A server that starts refuses connections, and whoever stands before it says 502 or 503.
                is_another = fault.status is not None and fault.status < 500
                if is_another or time.monotonic() > until:
                    raise LaunchError(
                        f"no vLLM server answers: {fault}",
                        "generate.vllm.server",
                        "start it, or correct the address",
                    ) from None
                time.sleep(WAIT_S)
        models = items(answer.get("data"), "its models")
        first = fields(models[0] if models else None, "its first model")
        served, room = first.get("id"), first.get("max_model_len")
        if not isinstance(served, str) or not (room is None or type(room) is int and room > 0):
            raise Impossible(f"its first model is {shown(first)}, without a name or a length")
        longest = max((len(group.prompt_ids) for group in groups), default=0)
        self.served, self.room = served, room
        if room is not None and longest >= room:
            raise LaunchError(
                f"the server takes {room} tokens, and a prompt has {longest}",
                "generate.vllm.server",
                "start it with a larger --max-model-len, or lower length.max_prompt",
            )

    def _give_weights(self) -> None:
        """Write a checkpoint, have it loaded, and forget computations of the previous one.

        Raises: LaunchError when the server offers no such thing; Unanswered.
        """
        mark = f"memtrain-{uuid.uuid4().hex[:12]}"
        folder = self.folder / mark
        self.made.append(folder)
        try:
            with system_errors():
                write_checkpoint(vllm_weights(self.model), folder)
        except OSError as error:
            remove_half_written(folder)
            raise disk_fault(error, "weights for the server cannot be written", folder) from None
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        try:
            self._ask("POST", "/collective_rpc", asked)
        except Unanswered as fault:
            if fault.status not in (404, 405):
                raise
            raise LaunchError(
                f"the server at {self.address} cannot load new weights (it has no /collective_rpc), and "
                "completions of old weights are not the policy's",
                "generate.vllm.server",
                DEV_MODE,
            ) from None
        self._ask("POST", "/reset_prefix_cache?reset_running_requests=true", {})
        self._ask("POST", "/update_weight_version", {"new_version": mark})
        self.mark = mark
        for old in self.made[:-1]:
            remove_half_written(old)
        self.made = [folder]

    def _mark_of_server(self) -> object:
        return self._ask("GET", "/weight_info").get("weight_version")

    def _check_weights(self, groups: Sequence[Group], limit: float) -> None:
        """Refuse weights that did not arrive whole.

        vLLM 0.32 on a CPU goes on with the old head where it is tied to the embedding.
        """
        group = canary_group(groups)
        found = difference(self.model, group, self._group(group, CANARY_SAMPLING, wants_logprobs=True)[0])
        if not found <= limit:
            raise LaunchError(
                f"the server's log-probs are {found:.2f} nats from the trainer's for the same weights "
                f"(generate.max_logprob_gap {limit:g}): some weights did not arrive",
                "generate.vllm.server",
                "a tied head on a CPU server is not updated: set generate.vllm.python instead of server; "
                "else check that the server has the same architecture",
            )

    def _write(self, progress: Progress, sampling: Sampling) -> None:
        """Have the missing groups written; groups of other weights are thrown away."""
        missing, groups = progress.missing, progress.groups
        made: dict[int, list[Sample]] = {}
        fault: Unanswered | Impossible | None = None
        with ThreadPoolExecutor(min(AT_ONCE, max(1, len(missing)))) as pool:
            asked = {
                pool.submit(self._group, groups[number], sampling, wants_logprobs=self.has_logprobs): number
                for number in missing
            }
            for answer in as_completed(asked):
                try:
                    made[asked[answer]] = answer.result()
                except (Unanswered, Impossible) as error:
                    fault = error
        if fault is None and self._mark_of_server() != self.mark:
            raise Stale("it does not hold the weights that it was given: it was restarted during generation")
        # Where an answer is missing the server may have been started again before it gave the others.
        if fault is not None:
            raise fault
        for number in sorted(made):
            progress.add(number, made[number])

    def _group(self, group: Group, sampling: Sampling, *, wants_logprobs: bool) -> list[Sample]:
        words = sampling_arguments(sampling)
        words.pop("detokenize")
        answer = self._ask(
            "POST",
            "/v1/completions",
            words
            | {
                "model": self.served,
                "prompt": list(group.prompt_ids),
                "n": group.count,
                "seed": group.seed % 2**SEED_BITS,
                "logprobs": 0 if wants_logprobs else None,
                "return_token_ids": True,
            },
            num_tokens=group.count * (len(group.prompt_ids) + sampling.max_tokens),
        )
        choices = choices_of(answer, group)
        if any(choice.get("token_ids") is None for choice in choices):
            # Text that is read again may be other tokens.
            raise LaunchError(
                "the server's completions have no token ids",
                "generate.vllm.server",
                "use vLLM 0.32 or newer, whose /v1/completions knows return_token_ids",
            )
        asked = Asked(sampling, vocab_size(self.model), self.room, wants_logprobs)
        return asked.samples([of_choice(choice, sampling) for choice in choices], group)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, num_tokens: int = 0
    ) -> dict[str, Any]:
        url = f"{self.address.rstrip('/')}{path}"
        return ask(method, url, body, self.deadline_s, num_tokens=num_tokens)

    def _go_on_or_give_up(self, faults: list[str], *, missing: int) -> None:
        words = f"the vLLM server failed ({faults[-1]})"
        if len(faults) <= self.restarts and self.ranks.world == 1:
            self.emit(
                f"{words}: waited for it, and loaded the same weights; {missing} groups are generated again"
            )
            self.served = None
            return
        if self.fallback is None:
            raise LaunchError(
                f"the vLLM server failed {len(faults)} times in one rollout; the last time: {faults[-1]}",
                "generate.vllm.server",
                "read its log; raise generate.vllm.restarts or deadline_s, or set "
                "generate.vllm.on_failure: native. The last checkpoint is intact",
            )
        self.emit(f"{words}, {len(faults)} times in one rollout: the trained module generates from now on")
        self.is_given_up = True


def write_checkpoint(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write safetensors files of at most SHARD_BYTES, or one tensor."""
    folder.mkdir(parents=True)
    shard: dict[str, Tensor] = {}
    used = count = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if shard and used + size > SHARD_BYTES:
            save_file(shard, folder / f"model-{count:05}.safetensors", {"format": "pt"})
            shard, used, count = {}, 0, count + 1
        shard[name] = tensor.detach().to("cpu", memory_format=torch.contiguous_format)
        used += size
    save_file(shard, folder / f"model-{count:05}.safetensors", {"format": "pt"})
