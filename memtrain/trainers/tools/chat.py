"""Conversation with the model of a run, turn by turn, on the device that is here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation.streamers import TextStreamer

from memtrain.errors import LaunchError, MemtrainError, OutOfMemory, words_of
from memtrain.memory.plan.plan import PLAN_FILE, plan_of_run, read_plan
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.tokenize.chat import template_of
from memtrain.trainers.data.tokenize.template_limits import check_length, within_limits
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.model.loading.adapters import load_adapter
from memtrain.trainers.model.loading.load import load_model
from memtrain.trainers.model.loading.locate import unknown_model
from memtrain.trainers.model.loading.own_code import trust_code
from memtrain.trainers.model.loading.save import stop_at
from memtrain.trainers.runtime.oom_errors import is_out_of_memory
from memtrain.trainers.tools.trained_model import TrainedModel, trusting_recipe


class _Written(TextStreamer):
    """Gives finished text to a function in place of stdout."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, emit: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.emit = emit
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.emit(text)


class Chat:
    """A trained model, and the messages so far."""

    def __init__(self, trained: TrainedModel, system: str | None = None, *, as_text: bool = False) -> None:
        """Load the model; `as_text`: without its chat template. Raises: LaunchError when it cannot be
        loaded."""
        self.tokenizer = load_tokenizer(str(trained.folder))
        self.model = load_trained(trained, len(self.tokenizer))
        self.has_template = template_of(self.tokenizer) is not None and not as_text
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.is_cut = False
        self.reset()

    def reset(self) -> None:
        """Forget the turns."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    @torch.no_grad()
    def answer(self, text: str, emit: Callable[[str], object], *, max_tokens: int, temperature: float) -> str:
        """The model's answer to a turn, given to `emit` as it is written; greedy at temperature 0.

        `is_cut` says afterwards whether it stopped at `max_tokens`, before an end of its own.
        Without a chat template the text is continued as it stands, and nothing is remembered. Of an answer
        that Ctrl-C stops, the part that was written is remembered.
        Raises: LaunchError when the template refuses the turns; DataError when it has no end.
        """
        prompt = self._rendered(text) if self.has_template else text
        encoded = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=not self.has_template)
        ids = encoded["input_ids"].to(self.model.device)  # pyright: ignore[reportAttributeAccessIssue]
        samples: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            samples["temperature"] = temperature
        written = _Written(self.tokenizer, emit)
        try:
            made = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                streamer=written,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                **samples,
            )
        except KeyboardInterrupt:
            self._remember(text, written.text.strip())
            raise
        except Exception as error:  # a model class, or a foreign generation_config.json, fails in its own way
            if is_out_of_memory(error):
                raise OutOfMemory(
                    f"out of memory while the model wrote: {words_of(error)}",
                    self.tokenizer.name_or_path,
                    "give --max-tokens a smaller number, or begin again with /reset",
                ) from None
            raise LaunchError(
                f"the model cannot write: {words_of(error)}",
                self.tokenizer.name_or_path,
                "compare its config.json, generation_config.json and tokenizer with the published ones",
            ) from None
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.is_cut = made.shape[1] - ids.shape[1] >= max_tokens and int(made[0, -1]) not in ends
        answer = str(self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)).strip()
        self._remember(text, answer)
        return answer

    def _rendered(self, text: str) -> str:
        """The turns so far, and one more of the user, as the template writes them."""
        turns = [*self.messages, {"role": "user", "content": text}]
        try:
            made = within_limits(
                lambda: self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            )
            check_length(str(made))
            return str(made)
        except MemtrainError:
            raise
        except Exception as error:  # a template raises what it likes
            raise LaunchError(
                f"the chat template refuses these turns: {words_of(error)}",
                self.tokenizer.name_or_path,
                "chat without --system" if self.system else "begin again with /reset, or give --text",
            ) from None

    def _remember(self, text: str, answer: str) -> None:
        """Keep a turn of the user and its answer, where there are turns."""
        if self.has_template:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def is_trained_on_text(run: Path) -> bool:
    """Whether the rows of a run were strings, written by no chat template: its model continues text."""
    path = run / PLAN_FILE
    return path.is_file() and read_plan(path, reveals=False).data.turn_end is None


def load_trained(trained: TrainedModel, vocab_size: int) -> Any:
    """The model of a run in evaluation mode, an adapter on its base.

    Raises: LaunchError when it cannot be loaded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if trained.is_adapter and not (trained.run / PLAN_FILE).is_file():
        return load_adapter(_whole(trained, _named_base(trained)).to(device), str(trained.folder)).eval()
    if not trained.is_adapter:
        if (recipe := trusting_recipe(trained)) is not None:
            trust_code(recipe)
        return _whole(trained, str(trained.folder)).to(device).eval()
    plan = plan_of_run(trained.run)
    settings = plan.settings.model_copy(
        update={"device": device, "quantize": "none", "attention": "transformers"}
    )
    base = load_model(
        plan.recipe.model,
        settings,
        seed=plan.recipe.train.seed,
        vocab_size=vocab_size,
        head=METHODS[plan.recipe.method].head,
        drawn_on=plan.settings.device,
    )
    if plan.data.turn_end is not None:
        stop_at(base, plan.data.turn_end.token_id)
    return load_adapter(base, str(trained.folder)).to(device).eval()


def _whole(trained: TrainedModel, place: str) -> Any:
    """The model in a folder, or of the hub, as its file says, on the CPU.

    Raises: LaunchError when it cannot be loaded whole.
    """
    is_own = place == str(trained.folder)
    again = "export the model again: memtrain export RUN" if is_own else "bring that model to this machine"
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            place,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",
            output_loading_info=True,
        )
        model, told = read
    except Exception as error:  # each model class has faults of its own
        if trained.config.get("auto_map"):
            raise unknown_model(trained.config, f"{trained.folder}/config.json") from None
        raise LaunchError(
            f"{place} cannot be loaded: {words_of(error)}",
            place,
            again,
        ) from None
    if lost := sorted(told["missing_keys"]):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise LaunchError(
            f"{place} has no weights for {lost[0]}{more}: they would be random",
            place,
            again,
        )
    return model


def _named_base(trained: TrainedModel) -> str:
    """The model that an adapter without its run names as its own. Raises: LaunchError where it names none."""
    if trained.base:
        return trained.base
    raise LaunchError(
        f"{trained.folder} does not name the model that it was trained on",
        str(trained.folder / ADAPTER_FILE),
        "give the folder of its run, or write base_model_name_or_path into that file",
    )
