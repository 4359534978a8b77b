"""Sampling by vLLM in a process of its own: weights brought up to date, faults survived, memory given back.

One rollout: take memory for weights, load them where they are not those of this step, take memory for keys,
write, give all back. A process that dies or hangs is replaced, gets the same weights, and writes only the
groups that are missing, with their seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peft import PeftModel
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.online.generation.progress import Progress
from memtrain.trainers.online.generation.protocol import Group, OnDone, Sample, Sampler, Sampling
from memtrain.trainers.online.vllm.answers import Asked, Impossible, whole
from memtrain.trainers.online.vllm.process import Faulty, Frame, Launch, Process
from memtrain.trainers.online.vllm.weight_check import CANARY_SAMPLING, canary_group, difference
from memtrain.trainers.online.vllm.weight_sync import Transport, in_buckets, vllm_weights
from memtrain.trainers.runtime.oom_errors import free

SEED_BITS = 62
"""vLLM takes seeds of 64 bits with a sign, and adds the number of the completion."""


@dataclass(slots=True)
class VllmSampler:
    """Samples with an engine process, which is started when it is first needed."""

    model: PreTrainedModel | PeftModel
    launch: Launch
    transport: Transport
    version: Callable[[], int]
    """Grows whenever the weights change."""
    emit: Callable[[str], None]
    sleep_level: int
    """Memory that the engine gives back between rollouts: 0 nothing, 1 keys, 2 weights too."""
    restarts: int
    """Times that the process is replaced in one rollout."""
    fallback: Callable[[], Sampler] | None
    """Sampler when the restarts are not enough; None: the run ends."""
    has_logprobs: bool = True
    """Whether the engine can say the log-probs that the trainer computes."""
    limit: float | None = None
    """Mean difference of log-probs above which it has other weights than it was given; None: any."""
    name: str = "vllm"
    process: Process | None = None
    held: int | None = None
    """Version of the weights that the process holds."""
    has_started: bool = False
    """Whether the engine worked at least once: later failures are no matter of installation."""
    is_asleep: bool = False
    is_given_up: bool = False
    acts: list[str] = field(default_factory=list)
    """Commands to the process in the last rollout, in order."""

    def generate(
        self, groups: Sequence[Group], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[list[Sample]]:
        """The completions of each group, in order, with the weights as they are now.

        Raises: LaunchError when the engine does not start, or fails more often than it may.
        """
        progress = Progress(groups, on_done)
        faults: list[str] = []
        self.acts.clear()
        while progress.missing and not self.is_given_up:
            try:
                self._prepare(groups)
                self._write(progress, sampling)
                self._rest()
            except Faulty as fault:
                self._end()
                if not self.has_started:
                    raise self._cannot_start(fault) from None
                faults.append(str(fault))
                self._replace_or_give_up(faults, missing=len(progress.missing))
        if self.is_given_up:
            assert self.fallback is not None, "Given up with somebody to go on."
            progress.finish_with(self.fallback(), sampling)
        return progress.in_order()

    def close(self) -> None:
        """End the process."""
        self._end()
        self.transport.close()

    def _prepare(self, groups: Sequence[Group]) -> None:
        """An engine that is awake and holds the weights of now; memory is taken as late as possible."""
        is_first = self.process is None
        if self.process is None:
            free()
            self.process = Process(self.launch)
            self.has_started = True
            self.acts.append("start")
            self.is_asleep = False
        if self.is_asleep:
            free()
            self._ask("wake weights", {"op": "wake", "tags": ["weights"]})
        if self.held != self.version():
            self._sync(self.process)
        if self.is_asleep:
            self._ask("wake keys", {"op": "wake", "tags": ["kv_cache"]})
            self.is_asleep = False
        if is_first and self.limit is not None:
            self._look_at(self.process, groups, self.limit)

    def _look_at(self, process: Process, groups: Sequence[Group], limit: float) -> None:
        """Refuse an engine with other weights than it was given: names, or a head, went wrong.

        Raises: LaunchError.
        """
        group = canary_group(groups)
        progress = Progress([group])
        self._write_all(process, progress, CANARY_SAMPLING, has_logprobs=True)
        found = difference(self.model, group, progress.done[0][0])
        if not found <= limit:
            raise LaunchError(
                f"vLLM's log-probs are {found:.2f} nats from the trainer's for the same weights "
                f"(generate.max_logprob_gap {limit:g}): some weights did not arrive",
                str(self.launch.log),
                "set generate.backend: native; and please report the architecture",
            )

    def _sync(self, process: Process) -> None:
        version = self.version()
        self.held = None
        buckets = in_buckets(vllm_weights(self.model), self.transport.bucket_bytes)
        is_cpu = next(self.model.parameters()).device.type == "cpu"
        process.sync(buckets, self.transport, version, is_cpu=is_cpu)
        self.acts.append("sync")
        self.held = version

    def _rest(self) -> None:
        """Give memory back; all completions are there."""
        if not self.sleep_level:
            return
        self._ask("sleep", {"op": "sleep", "level": self.sleep_level})
        self.is_asleep = True
        if self.sleep_level > 1:
            self.held = None

    def _ask(self, act: str, frame: Frame) -> None:
        assert self.process is not None, "The process was started."
        self.process.ask(frame)
        self.acts.append(act)

    def _write(self, progress: Progress, sampling: Sampling) -> None:
        """Have the groups written that are missing."""
        assert self.process is not None, "The process was started."
        self._write_all(self.process, progress, sampling, has_logprobs=self.has_logprobs)
        self.acts.append("write")

    def _write_all(
        self, process: Process, progress: Progress, sampling: Sampling, *, has_logprobs: bool
    ) -> None:
        groups, missing = progress.groups, progress.missing
        process.send(
            {
                "op": "generate",
                "version": self.held,
                "sampling": sampling_arguments(sampling) | {"logprobs": 0 if has_logprobs else None},
                "groups": [
                    {
                        "number": number,
                        "prompt": list(groups[number].prompt_ids),
                        "count": groups[number].count,
                        "seed": groups[number].seed % 2**SEED_BITS,
                    }
                    for number in missing
                ],
            }
        )
        room = self.launch.engine.get("max_model_len")
        asked = Asked(sampling, vocab_size(self.model), room, has_logprobs)
        open_numbers = set(missing)
        while (frame := process.receive())["ev"] != "ok":
            if frame["ev"] == "done":
                self._take(frame, asked, progress, open_numbers)
            elif frame["ev"] != "progress":
                raise Faulty(f"{frame['ev']} came in place of completions")
        if open_numbers:
            raise Faulty(f"{len(open_numbers)} of {len(missing)} groups of completions did not come")

    def _take(self, frame: Frame, asked: Asked, progress: Progress, open_numbers: set[int]) -> None:
        """The completions of one group. Raises: Faulty where they are none that were asked."""
        try:
            number = whole(frame.get("number"), "the number of a group")
            if number not in open_numbers:
                raise Impossible(f"completions of group {number} came, which were not asked or came before")
            if frame.get("version") != self.held:
                raise Impossible(
                    f"completions of weights {frame.get('version')} came, of {self.held} were asked"
                )
            samples = asked.samples(frame.get("samples"), progress.groups[number])
        except Impossible as error:
            raise Faulty(str(error)) from None
        open_numbers.remove(number)
        progress.add(number, samples)

    def _replace_or_give_up(self, faults: list[str], *, missing: int) -> None:
        words = f"the vLLM process failed ({faults[-1]})"
        if not missing:
            self.emit(f"{words} after all completions were generated: it is restarted for the next ones")
            return
        if len(faults) <= self.restarts:
            self.emit(
                f"{words}: restarted with the same weights; {missing} groups are generated again by their "
                "seeds"
            )
            return
        if self.fallback is None:
            raise LaunchError(
                f"the vLLM process failed {len(faults)} times in one rollout; the last time: {faults[-1]}",
                str(self.launch.log),
                "read the log; raise generate.vllm.restarts, or set generate.vllm.on_failure: native to "
                "continue without it. The last checkpoint is intact",
            )
        self.emit(f"{words}, {len(faults)} times in one rollout: the trained module generates from now on")
        self.is_given_up = True

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.process, self.held, self.is_asleep = None, None, False
        self.transport.clear()

    def _cannot_start(self, fault: Faulty) -> LaunchError:
        python = self.launch.python
        return LaunchError(
            f"the vLLM process does not start: {fault}",
            str(self.launch.log),
            f"{python} must have vLLM (docs/generation.md says how to install it in a separate "
            "environment); give its interpreter with generate.vllm.python, or set generate.backend: native",
        )


def sampling_arguments(sampling: Sampling) -> Frame:
    """Our sampling in vLLM's words, every field, for the server has defaults of its own."""
    frame: Frame = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k if sampling.top_k is not None else 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        # Our stop tokens are the recipe's; vLLM's own would come on top.
        "ignore_eos": True,
        "detokenize": bool(sampling.stop_strings),
    }
    if sampling.stop_strings:
        frame |= {
            "stop": list(sampling.stop_strings),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
    return frame


def vocab_size(model: PreTrainedModel | PeftModel) -> int:
    """Tokens that the policy knows."""
    return int(base_model(model).config.get_text_config().vocab_size)
