"""Saving: what was trained is what transformers reads; adapters stay small; merging adds in float32."""

import copy
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_utils

from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import PLAN_FILE, Plan, Prediction, PreparedData, PreparedSplit, read_plan
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.data import Data
from memtrain.recipes.sections.model import Adapter, Model
from memtrain.trainers.checkpoints.state_io import save_state
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.model.loading.adapters import add_adapter, load_adapter
from memtrain.trainers.model.loading.layers_of_files import without_data
from memtrain.trainers.model.loading.load import load_model
from memtrain.trainers.model.loading.save import save_final
from memtrain.trainers.tools import merge, same_model
from memtrain.trainers.tools.merge import fold, fold_by_module, merge_run

TinyModel = Callable[..., Any]
SETTINGS = Settings(
    device="cpu", num_processes=1, threads=1, dtype="bfloat16", attention="transformers", liger=False,
    adapter=Adapter(r=4), quantize="none", max_length=64, truncation="keep_start", packing="none",
    cross_document_attention=False, padding_free=False, pad_to_multiple_of=None, group_by_length=False,
    batch_size=2, batch_tokens=None, micro_batch_size=2, micro_tokens=None, max_steps=10, checkpoint_every=0,
    offload="none", loss="full", loss_tile_bytes=1 << 20, optimizer="adamw", master_weights=False,
    expandable_segments=False,
)  # fmt: skip
IDS = torch.randint(1, 128, (1, 8), generator=torch.Generator().manual_seed(0))


def trained(model: Any, adapter: Adapter) -> PeftModel:
    """An adapter whose B is no longer zero."""
    torch.manual_seed(0)
    adapted = add_adapter(model, adapter)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.02)
    return adapted


def test_transformers_reads_what_was_saved(tiny_model: TinyModel, tmp_path: Path):
    model = tiny_model().eval()
    model.config.use_cache = False
    tokenizer = load_tokenizer("builtin:tiny")
    save_final(model, tokenizer, tmp_path / "final")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    assert torch.equal(read(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert read.config.use_cache is True
    assert model.config.use_cache is False
    ends = read.generation_config.eos_token_id
    assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
    assert AutoTokenizer.from_pretrained(tmp_path / "final").get_vocab() == tokenizer.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def checkpointed(model: Any, folder: Path) -> Path:
    """The weights of a model as a checkpoint of it holds them."""
    folder.mkdir()
    save_state(
        {f"model.{name}": p for name, p in model.named_parameters()}, folder / "weights", root="model."
    )
    return folder / "weights.safetensors"


def test_weights_of_a_checkpoint_are_linked(tiny_model: TinyModel, tmp_path: Path, monkeypatch):
    """Where names match; and no wrapper of the model is looked for, which imports DeepSpeed."""
    model = tiny_model().eval()
    saved = checkpointed(model, tmp_path / "step")
    monkeypatch.setattr(modeling_utils, "unwrap_model", None)
    save_final(model, load_tokenizer("builtin:tiny"), tmp_path / "final", saved=saved)
    assert saved.samefile(tmp_path / "final" / "model.safetensors")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    assert torch.equal(read(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("why", ["another disk", "another name", "another type"])
def test_weights_are_written_where_they_cannot_be_linked(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch, why: str
):
    def refuse(*given: object) -> None:
        raise OSError(errno.EXDEV, "another disk")

    model = tiny_model().eval()
    saved = checkpointed(model, tmp_path / "step")
    if why == "another disk":
        monkeypatch.setattr("os.link", refuse)
    elif why == "another name":
        save_state(
            {f"model.{name}s": p for name, p in model.named_parameters()}, tmp_path / "step" / "weights"
        )
    else:
        model = model.to(torch.bfloat16)
    save_final(model, load_tokenizer("builtin:tiny"), tmp_path / "final", saved=saved)
    assert not saved.samefile(tmp_path / "final" / "model.safetensors")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=model.dtype).state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in model.state_dict().items())


def test_saving_again_replaces_the_folder(tiny_llama: TinyModel, tmp_path: Path):
    tokenizer = load_tokenizer("builtin:tiny")
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "old").touch()
    save_final(tiny_llama(), tokenizer, tmp_path / "final")
    assert not (tmp_path / "final" / "old").exists()


def test_a_disk_that_refuses_is_reported(tiny_llama: TinyModel, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="the model cannot be saved"):
        save_final(tiny_llama(), load_tokenizer("builtin:tiny"), tmp_path / "file" / "final")


def test_a_disk_that_is_full_is_reported_and_nothing_half_made_stays(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """safetensors has an error of its own for it, with the system's number in its words."""
    model = tiny_llama()

    def full(*args: object, **kwargs: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(LaunchError, match="No space left on device") as refused:
        save_final(model, load_tokenizer("builtin:tiny"), tmp_path / "final")
    assert "free some space" in refused.value.faults[0].fix
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_is_saved_as_an_adapter(tiny_llama: TinyModel, tmp_path: Path):
    base = tiny_llama()
    adapted = trained(copy.deepcopy(base), Adapter(r=2, target_modules=("q_proj",))).eval()
    save_final(adapted, load_tokenizer("builtin:tiny"), tmp_path / "final")
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert "model.safetensors" not in names
    assert (tmp_path / "final" / "adapter_model.safetensors").stat().st_size < 10_000
    read = PeftModel.from_pretrained(base, str(tmp_path / "final")).eval()
    assert torch.equal(read(input_ids=IDS).logits, adapted(input_ids=IDS).logits)


@pytest.mark.parametrize(
    "adapter",
    [
        Adapter(r=4),
        Adapter(r=4, rslora=True),
        Adapter(kind="dora", r=4, target_modules=("q_proj", "up_proj")),
        Adapter(r=4, target_modules=("q_proj", "embed_tokens"), modules_to_save=("lm_head",)),
    ],
)
def test_a_folded_model_computes_what_the_adapted_one_did(tiny_model: TinyModel, adapter: Adapter):
    adapted = trained(tiny_model(), adapter).eval()
    expected = adapted(input_ids=IDS).logits
    model, _ = fold(adapted, torch.float32)
    assert not any("lora" in name for name, _ in model.named_modules())
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_folding_rounds_once(tiny_llama: TinyModel):
    """bfloat16 weights plus a float32 update, rounded to bfloat16 at the end."""
    adapted = trained(tiny_llama().bfloat16(), Adapter(r=4, alpha=8.0, target_modules=("q_proj",)))
    layer = adapted.base_model.model.model.layers[1].self_attn.q_proj
    update = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    by_hand = (layer.base_layer.weight.float() + update).bfloat16()
    model, num_modules = fold(adapted, torch.bfloat16)
    assert num_modules == 2
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, by_hand)


def finished_run(folder: Path, adapter: Adapter | None) -> Any:
    """The run folder of a tiny model; its trained model is returned."""
    recipe = Recipe(
        method="sft",
        model=Model(path="builtin:tiny", adapter=adapter),
        data=Data.model_validate({"train": "x"}),
    )
    settings = SETTINGS.model_copy(update={"adapter": adapter})
    split = PreparedSplit(
        folder="x", num_rows=1, num_tokens=1, num_loss_tokens=1, num_skipped=0, longest_tokens=1
    )
    none = Prediction(phases=(), method="arithmetic", budget_bytes=None)
    plan = Plan(
        recipe=recipe, recipe_path="x.yaml", run_dir=str(folder), settings=settings, decisions=(),
        data=PreparedData(train=split, eval=None, held_out_rows=0), prediction=none, plain=none, versions={},
    )  # fmt: skip
    tokenizer = load_tokenizer("builtin:tiny")
    model = load_model(recipe.model, settings, seed=recipe.train.seed, vocab_size=len(tokenizer))
    if adapter is not None:
        model = trained(model, adapter)
    folder.mkdir()
    plan.write(folder)
    save_final(model, tokenizer, folder / "final")
    return model.eval()


def test_merging_a_run_gives_a_model_that_transformers_reads(tmp_path: Path):
    adapted = finished_run(tmp_path / "run", Adapter(r=4))
    merged = merge_run(tmp_path / "run", dtype="float32")
    assert merged.folder == tmp_path / "run" / "merged"
    assert merged.num_modules == 28
    read = AutoModelForCausalLM.from_pretrained(merged.folder).eval()
    assert read.dtype == torch.float32
    expected = adapted(input_ids=IDS).logits.float()
    assert (read(input_ids=IDS).logits - expected).norm() / expected.norm() < 0.02
    assert json.loads((merged.folder / "config.json").read_text())["model_type"] == "qwen3"
    with pytest.raises(LaunchError, match="exists already"):
        merge_run(tmp_path / "run")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_merged_model_is_compared_with_its_adapter(dtype: str, tmp_path: Path):
    """The difference is rounding's, of each precision; the row is of fixed tokens where no data is kept."""
    finished_run(tmp_path / "run", Adapter(r=4, target_modules=("q_proj", "lm_head")))
    found = merge_run(tmp_path / "run", dtype=dtype).compared
    assert found.row == "a row of 32 fixed tokens"
    assert 0 <= found.mean <= 2 * found.rounding + 1e-6
    assert found.mean <= found.largest
    assert (found.mean > 1e-5) is (dtype != "float32")
    assert "log-probs differ by" in found.words("the adapter on its base")


@pytest.mark.parametrize("fault", ["shared", "scale", "nan"])
def test_a_merged_model_that_is_another_is_refused_and_removed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An update in both of two tied weights, one that is twice too large, and weights that are no numbers."""
    finished_run(tmp_path / "run", Adapter(r=4, target_modules=("q_proj", "lm_head")))
    plain = merge._add_update

    def twice(layer: Any, dtype: torch.dtype) -> None:
        layer.scaling = {name: 2 * scale for name, scale in layer.scaling.items()}
        plain(layer, dtype)

    def nan(layer: Any, dtype: torch.dtype) -> None:
        layer.get_base_layer().weight.data.fill_(float("nan"))

    wrong = {
        "shared": ("_untie", lambda *_: None),
        "scale": ("_add_update", twice),
        "nan": ("_add_update", nan),
    }
    monkeypatch.setattr(merge, *wrong[fault])
    with pytest.raises(LaunchError, match="the merged model is not the same model as the adapter"):
        merge_run(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"plan.json", "final"}


@pytest.mark.parametrize("fault", ["", "scale", "one row"])
def test_a_choice_that_rounding_turns_over_is_no_other_model(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A router that rounding turned over for one token: some reading with moved weights turns it over too."""
    finished_run(tmp_path / "run", None)
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(20, 50, generator=generator).log_softmax(-1)
    written = expected + 1e-3 * torch.randn(20, 50, generator=generator)
    written[7] += 0.5
    if fault:
        written[slice(None) if fault == "scale" else 3] += 2.0
    draws: list[int] = []

    def outputs(make: Any, row: Any, *, adapter: Any, moves: same_model.Moves | None = None) -> Any:
        if moves is None:
            return written, frozenset()
        draws.append(moves.draw)
        moved = written + 1e-3 * torch.randn(20, 50, generator=generator)
        moved[7] += 0.5 if moves.draw == 3 else 0.0
        return moved, frozenset()

    monkeypatch.setattr(same_model, "outputs", outputs)
    plan = read_plan(tmp_path / "run" / PLAN_FILE)
    row = same_model.Row(torch.arange(21)[None], "a row")
    found = same_model.difference(plan, row, expected, finished_run, (), "bfloat16")
    if fault:
        with pytest.raises(LaunchError, match="is not the same model"):
            same_model.refuse_another(found, "one", "another", tmp_path)
        assert draws == list(range(same_model.DRAWS))
    else:
        same_model.refuse_another(found, "one", "another", tmp_path)
        assert draws == [0, 1, 2, 3]


def test_a_head_trained_apart_from_its_tied_embedding_is_merged_as_untied(
    tiny_llama: TinyModel, tmp_path: Path
):
    adapted = trained(tiny_llama(tie_word_embeddings=True), Adapter(r=2, modules_to_save=("lm_head",)))
    expected = adapted(input_ids=IDS).logits
    model, _ = fold(adapted, torch.float32)
    save_final(model, load_tokenizer("builtin:tiny"), tmp_path / "final")
    assert json.loads((tmp_path / "final" / "config.json").read_text())["tie_word_embeddings"] is False
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    assert torch.allclose(read(input_ids=IDS).logits, expected, atol=1e-5)


def test_what_cannot_be_merged_is_reported(tmp_path: Path):
    with pytest.raises(LaunchError, match="the run folder has no plan"):
        merge_run(tmp_path)
    finished_run(tmp_path / "full", None)
    with pytest.raises(LaunchError, match="is already a full model"):
        merge_run(tmp_path / "full")
    finished_run(tmp_path / "adapter", Adapter(r=2))
    with pytest.raises(LaunchError, match="unknown precision of weights: int4"):
        merge_run(tmp_path / "adapter", dtype="int4")


def test_the_files_of_a_saved_model_share_one_mode(tiny_llama: TinyModel, tmp_path: Path):
    """safetensors writes for the owner alone: a group could read all of a model but its weights."""
    model = tiny_llama()
    save_final(model, load_tokenizer("builtin:tiny"), tmp_path / "final")
    plain = tmp_path / "plain"
    plain.touch()
    modes = {path.stat().st_mode for path in (tmp_path / "final").iterdir()}
    assert modes == {plain.stat().st_mode}


def written(folder: Path) -> dict[str, bytes]:
    """The bytes of a folder's files of weights, and of their index."""
    return {file.name: file.read_bytes() for file in folder.glob("model*")}


STACKS = ("experts.gate_up_proj", "experts.down_proj")
MIXTURE = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_experts": 4,
    "vocab_size": 40, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "is_tied", "adapter"),
    [
        ("llama", True, Adapter(r=2)),
        ("llama", True, Adapter(r=2, modules_to_save=("lm_head",))),
        ("qwen2", False, Adapter(kind="dora", r=2, target_modules=("q_proj", "up_proj"))),
        ("gpt2", True, Adapter(r=2, target_modules=("c_attn", "wte"))),
        (
            "qwen3_moe",
            False,
            Adapter(r=2, target_modules=("q_proj",), target_parameters=STACKS),
        ),
    ],
)  # fmt: skip
def test_merging_module_by_module_writes_the_bytes_of_merging_the_whole(
    tmp_path: Path, family: str, is_tied: bool, adapter: Adapter
):
    """Biases, tied and untied heads, weights of another shape in their files, and stacks of experts."""
    torch.manual_seed(1)
    widths = {key: value for key, value in MIXTURE.items() if family == "qwen3_moe" or "moe" not in key}
    config = AutoConfig.for_model(family, **widths, tie_word_embeddings=is_tied)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base", max_shard_size="8KB")
    tokenizer = load_tokenizer("builtin:tiny")
    save_final(trained(base, adapter), tokenizer, tmp_path / "adapter")

    def loaded() -> Any:
        return load_model(Model(path=str(tmp_path / "base")), SETTINGS, seed=0, vocab_size=40)

    whole, num_modules = fold(load_adapter(loaded(), str(tmp_path / "adapter")), torch.float16)
    save_final(whole, tokenizer, tmp_path / "whole", max_shard_bytes=5000)
    empty, kept = without_data(loaded)
    model, number, weights = fold_by_module(empty, kept, str(tmp_path / "adapter"), torch.float16)
    assert number == num_modules
    assert all(p.is_meta or name == "lm_head.weight" for name, p in model.named_parameters())
    save_final(model, tokenizer, tmp_path / "apart", weights, max_shard_bytes=5000)
    assert len(written(tmp_path / "whole")) > 2
    assert written(tmp_path / "apart") == written(tmp_path / "whole")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "apart" / name).read_text() == (tmp_path / "whole" / name).read_text()


ON_BOTH = {
    "lora_in": Adapter(r=2, target_modules=("q_proj", "embed_tokens")),
    "lora_out": Adapter(r=2, target_modules=("q_proj", "lm_head")),
    "lora_both": Adapter(r=2, target_modules=("embed_tokens", "lm_head"), rslora=True),
    "dora_both": Adapter(r=2, target_modules=("embed_tokens", "lm_head"), kind="dora"),
    "whole_in": Adapter(r=2, target_modules=("q_proj",), modules_to_save=("embed_tokens",)),
    "whole_both": Adapter(r=2, target_modules=("q_proj",), modules_to_save=("embed_tokens", "lm_head")),
    "whole_in_lora_out": Adapter(r=2, target_modules=("lm_head",), modules_to_save=("embed_tokens",)),
    "lora_and_whole_in": Adapter(
        r=2, target_modules=("q_proj", "embed_tokens"), modules_to_save=("embed_tokens",)
    ),
}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("adapter", ON_BOTH.values(), ids=ON_BOTH.keys())
def test_an_adapter_on_the_embedding_or_the_head_changes_that_one_alone(
    adapter: Adapter, family: str, is_tied: bool, tmp_path: Path
):
    """Of a model that ties them, too, and of one that scales its embedding: an adapter folded into the shared
    weight was in the other module as well."""
    torch.manual_seed(1)
    widths = {key: value for key, value in MIXTURE.items() if "expert" not in key and "moe" not in key}
    config = AutoConfig.for_model(family, **widths, tie_word_embeddings=is_tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    settings = SETTINGS.model_copy(update={"dtype": "float32"})

    def loaded() -> Any:
        return load_model(Model(path=str(tmp_path / "base")), settings, seed=0, vocab_size=40)

    adapted = add_adapter(loaded(), adapter)
    for p in (p for p in adapted.parameters() if p.requires_grad):
        p.data += 0.1 * torch.randn_like(p)
    ids = IDS % 40
    expected = adapted.eval()(input_ids=ids).logits
    tokenizer = load_tokenizer("builtin:tiny")
    save_final(adapted, tokenizer, tmp_path / "adapter")
    whole, _ = fold(load_adapter(loaded(), str(tmp_path / "adapter")), torch.float32)
    save_final(whole, tokenizer, tmp_path / "whole")
    empty, kept = without_data(loaded)
    model, _, weights = fold_by_module(empty, kept, str(tmp_path / "adapter"), torch.float32)
    save_final(model, tokenizer, tmp_path / "apart", weights)
    assert written(tmp_path / "apart") == written(tmp_path / "whole")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "apart").eval()
    torch.testing.assert_close(read(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert read.config.tie_word_embeddings is False
