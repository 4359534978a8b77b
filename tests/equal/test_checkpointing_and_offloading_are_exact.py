"""Every treatment of activations gives the losses, norms and weights of the plain run, to the bit."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.model import Adapter
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.offload import activations as activations_module
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.copy_engines import LazyEngine, SyncEngine
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.optim.build import build_optimizer
from memtrain.trainers.optim.step import clip_gradients

TinyModel = Callable[..., Any]
SETTINGS = Settings(
    device="cpu", num_processes=1, threads=1, dtype="float32", attention="torch_cpu", liger=False,
    adapter=None,
    quantize="none", max_length=64, truncation="keep_start", packing="none", cross_document_attention=False,
    padding_free=False, pad_to_multiple_of=None, group_by_length=False, batch_size=2, batch_tokens=None,
    micro_batch_size=2, micro_tokens=None, max_steps=10, checkpoint_every=0, offload="none", loss="full",
    loss_tile_bytes=1 << 20, optimizer="adamw", master_weights=False, expandable_segments=False,
)  # fmt: skip
LENGTHS = (5, 9, 2, 8)


def train(model: Any, num_steps: int = 3) -> tuple[list[float], list[float]]:
    """Losses and norms of steps of two packed micro-batches each, with dropout where the model has it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(model.train(), Optim(lr=1e-2), SETTINGS)
    layout = packed_layout(LENGTHS)
    losses: list[float] = []
    norms: list[float] = []
    torch.manual_seed(0)
    for _ in range(num_steps):
        for _ in range(2):
            ids = torch.randint(1, 128, (1, sum(LENGTHS)))
            logits = model(
                input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False
            ).logits[0]
            loss = torch.nn.functional.cross_entropy(
                logits[layout.predicting_rows], ids[0, layout.predicted_rows]
            )
            loss.backward()
            losses.append(loss.item())
        norms.append(clip_gradients(parameters, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize(
    ("every", "where"),
    [(1, "none"), (2, "none"), (1, "boundaries"), (2, "boundaries"), (0, "all"), (2, "all")],
)
def test_training_is_the_same(tiny_model: TinyModel, monkeypatch, every: int, where: str, is_adapted: bool):
    monkeypatch.setattr(activations_module, "Offloader", partial(Offloader, min_bytes=512))
    plain = tiny_model(num_hidden_layers=3)
    set_attention(plain, "torch_cpu")
    if is_adapted:
        torch.manual_seed(1)
        plain = add_adapter(plain, Adapter(r=4, dropout=0.1))
    treated = copy.deepcopy(plain)
    settings = SETTINGS.model_copy(update={"checkpoint_every": every, "offload": where})
    activations = apply_checkpointing_and_offload(treated, settings, LazyEngine())
    assert train(plain) == train(treated)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), treated.parameters(), strict=True))
    if where != "none":
        assert activations.offloader is not None
        assert activations.offloader.traffic.back_bytes > 0


def test_inputs_of_the_last_layers_stay_and_the_oldest_go_to_disk(
    tiny_model: TinyModel, monkeypatch, tmp_path: Path
):
    """Of three layers two keep theirs; of all three on the host, two of 6 KiB have no room in 8 KiB."""
    monkeypatch.setattr(activations_module, "Offloader", partial(Offloader, min_bytes=512))
    plain = tiny_model(num_hidden_layers=3)
    set_attention(plain, "torch_cpu")
    away = SETTINGS.model_copy(update={"checkpoint_every": 1, "offload": "boundaries"})
    folder = tmp_path / "waiting"
    changes = (
        {},
        {"offload_keep": 2},
        {"offload_disk": str(folder), "offload_host_bytes": 8 * 1024},
    )
    made = [copy.deepcopy(plain) for _ in changes]
    offloaders = [
        apply_checkpointing_and_offload(model, away.model_copy(update=change), SyncEngine()).offloader
        for model, change in zip(made, changes, strict=True)
    ]
    expected = train(plain)
    for model in made:
        assert train(model) == expected
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    everything, kept, spilled = (one.traffic.out_bytes for one in offloaders if one is not None)
    assert everything == spilled == 3 * kept
    disk = offloaders[2]._disk  # pyright: ignore
    assert disk is not None
    assert disk.written_bytes > 0
    assert not list(folder.iterdir()), "no file outlives its block"


def test_a_folder_that_cannot_be_written_is_reported(tiny_model: TinyModel, tmp_path: Path):
    (tmp_path / "file").write_text("")
    settings = SETTINGS.model_copy(
        update={"checkpoint_every": 1, "offload": "boundaries", "offload_disk": str(tmp_path / "file" / "in")}
    )
    with pytest.raises(LaunchError, match="activations cannot be written to"):
        apply_checkpointing_and_offload(tiny_model(), settings)


def test_boundaries_without_checkpointing_are_refused(tiny_model: TinyModel):
    settings = SETTINGS.model_copy(update={"offload": "boundaries"})
    with pytest.raises(LaunchError, match="needs activation checkpointing"):
        apply_checkpointing_and_offload(tiny_model(), settings)
