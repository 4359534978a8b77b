"""TRL's configurations become recipes that train the same, and nothing of them is lost silently.

The keys and defaults of TRL 1.16 were recorded by `benchmarks/record_trl_fields.py`.
"""

import json
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.importers.importing import Imported, read_foreign
from memtrain.recipes.importers.importing import import_config as imported
from memtrain.recipes.peers.table import Same, table
from memtrain.recipes.reading.load import load_text
from memtrain.recipes.trl.page import trl_page
from memtrain.recipes.trl.translate import IMPORTED, translate
from memtrain.recipes.trl.writing import default_of

ROOT = Path(__file__).parents[2]
KEYS = table("trl").rows
RECORDED = json.loads((Path(__file__).parent / "data" / "trl_fields.json").read_text())

WHOLE = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "dataset_name": "some/rows",
    "reward_funcs": ["my.rewards.good"],
    "teacher_model_name_or_path": "Qwen/Qwen3-4B",
}
"""What a configuration must say at least."""

READ_BY = {"reward_funcs": ("grpo", "rloo"), "teacher_model_name_or_path": ("distill",)}
"""Keys of it that some methods alone read."""


def recipe_of(method: str, processes: int = 1, **config: object):
    """The validated recipe of a configuration."""
    needs = {key: value for key, value in WHOLE.items() if method in READ_BY.get(key, (method,))}
    from memtrain.recipes.trl.writing import recipe_text

    made = translate(needs | config, method, processes)
    return load_text(recipe_text(made, "trl.yaml"), "recipe.yaml").recipe, made


def import_config(path: Path, method: str, processes: int | None) -> Imported:
    return imported(read_foreign(str(path), "trl", method, processes))


def lost(made) -> set[str]:
    return {one.key for one in made.lost}


@pytest.mark.parametrize("method", IMPORTED)
def test_every_key_of_trl_has_a_rule(method: str):
    assert set(RECORDED[method]) <= set(KEYS)


@pytest.mark.parametrize("method", IMPORTED)
def test_a_default_of_trl_that_is_not_ours_is_written(method: str):
    """Else a configuration that does not say it would train something else here."""
    for key, default in RECORDED[method].items():
        row = KEYS[key]
        if row.default_of(method) is not None:
            assert row.default_of(method) == default, key
            continue
        if not row.is_carried:
            continue
        section = row.to.partition(".")[0]
        if section in IMPORTED and section != method:
            continue
        taken = row.taken(default)
        ours = default_of(row.to.format(method=method))
        if default is None or taken in (None, Same) or ours in (None, "auto"):
            continue  # Not set at TRL, or a choice between computations of the same numbers.
        assert taken == ours, key


def test_every_target_is_a_key_of_the_recipe():
    for key, row in KEYS.items():
        for method in IMPORTED:
            if row.to and ("{method}" not in row.to or key in RECORDED[method]):
                default_of(row.to.format(method=method))


@pytest.mark.parametrize("method", IMPORTED)
def test_the_shortest_configuration_is_a_whole_recipe_with_trls_defaults(method: str):
    recipe, made = recipe_of(method)
    assert recipe.method == method
    assert recipe.train.epochs == 3
    assert recipe.train.batch_size == 8
    assert recipe.train.seed == 42
    assert recipe.optim.schedule == "linear"
    assert recipe.optim.warmup_steps == 0
    assert recipe.optim.lr == RECORDED[method]["learning_rate"]
    assert recipe.save.every_steps == 500
    assert not made.lost


@pytest.mark.parametrize("method", IMPORTED)
def test_writing_trls_own_defaults_out_changes_nothing(method: str):
    """Every default that was recorded, written into the file: nothing is lost, and the recipe is the same."""
    said = {key: value for key, value in RECORDED[method].items() if value not in (None, "", [])}
    written, made = recipe_of(method, **{key: value for key, value in said.items() if key not in _READ_WITH})
    bare, _ = recipe_of(method)
    assert lost(made) == set()
    same = {"length": {"padding_free"}, "memory": {"activation_checkpointing", "activation_offloading"}}
    for section in ("optim", "train", "eval", "save", "data", "generate", "length", "memory", method):
        left, right = getattr(written, section), getattr(bare, section)
        left, right = left or right and type(right)(), right or left and type(left)()
        for name in type(left).model_fields if left is not None else ():
            if name not in same.get(section, set()):
                assert getattr(left, name) == getattr(right, name), f"{section}.{name}"


_READ_WITH = {
    "max_steps",  # -1: epochs
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    *(key for method in IMPORTED for key in RECORDED[method] if key.startswith("vllm_")),
}
"""Keys that TRL reads only beside another one; written alone they are reported as lost."""


def test_the_batch_is_that_of_all_devices():
    recipe, _ = recipe_of("sft", 4, per_device_train_batch_size=2, gradient_accumulation_steps=8)
    assert recipe.train.batch_size == 64


def test_a_rollout_is_as_many_steps_as_it_was():
    recipe, _ = recipe_of("grpo", 2, gradient_accumulation_steps=2, steps_per_generation=8, num_generations=4)
    assert recipe.train.batch_size == 32
    assert recipe.grpo is not None
    assert recipe.grpo.steps_per_rollout == 4


def test_vllm_is_corrected_for_as_trl_does():
    recipe, made = recipe_of(
        "grpo", use_vllm=True, vllm_gpu_memory_utilization=0.4, vllm_tensor_parallel_size=2
    )
    assert recipe.generate is not None
    assert recipe.generate.vllm is not None
    assert recipe.grpo is not None
    assert (recipe.generate.backend, recipe.generate.vllm.memory_share) == ("vllm", 0.4)
    assert (
        recipe.grpo.importance_correction,
        recipe.grpo.importance_correction_min,
        recipe.grpo.importance_correction_max,
    ) == (
        "sequence_mask",
        None,
        3.0,
    )
    assert lost(made) == {"vllm_tensor_parallel_size"}
    rloo = recipe_of("rloo", use_vllm=True)[0].rloo
    assert rloo is not None
    assert rloo.importance_correction == "none"


def test_a_server_keeps_its_address():
    recipe, _ = recipe_of("rloo", use_vllm=True, vllm_mode="server", vllm_server_port=9000)
    assert recipe.generate is not None
    assert recipe.generate.vllm is not None
    assert recipe.generate.vllm.server == "http://localhost:9000"


def test_gkd_is_distillation_at_trls_own_temperatures():
    """TRL's `temperature` is of the sampling: its trainer calls the loss without it, at 1."""
    recipe, made = recipe_of("distill", beta=0.0, lmbda=0.25, temperature=0.7, max_new_tokens=64)
    assert recipe.distill is not None
    assert recipe.generate is not None
    taken = recipe.distill
    assert (taken.teacher, taken.beta, taken.on_policy_fraction) == ("Qwen/Qwen3-4B", 0.0, 0.25)
    assert (taken.temperature, recipe.generate.temperature, recipe.generate.max_tokens) == (1.0, 0.7, 64)
    assert (recipe.data.last_turn_only_loss, recipe.length.truncation) == (True, "keep_end")
    assert not made.lost
    assert any("distill.temperature" in note for note in made.notes)


def test_what_gkd_takes_where_nothing_is_written_is_written():
    recipe, _ = recipe_of("distill")
    assert recipe.distill is not None
    assert recipe.generate is not None
    assert (recipe.distill.beta, recipe.distill.on_policy_fraction) == (0.5, 0.5)
    assert (recipe.generate.temperature, recipe.generate.max_tokens) == (0.9, 128)


def test_gkd_without_completions_has_no_keys_for_them():
    recipe, made = recipe_of("distill", lmbda=0.0, temperature=0.7)
    assert recipe.generate is None
    assert lost(made) == {"temperature"}


def test_an_adapter_of_pairs_has_no_dropout_as_trl_switches_it_off():
    assert recipe_of("sft", use_peft=True)[0].model.adapter.dropout == 0.05
    assert recipe_of("dpo", use_peft=True)[0].model.adapter.dropout == 0.0
    assert recipe_of("dpo", use_peft=True, disable_dropout=False)[0].model.adapter.dropout == 0.05


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("modules", "taken", "stacks"),
    [
        (["q_proj"], ("q_proj",), tuple(EXPERTS)),
        (None, ("q_proj", "v_proj"), tuple(EXPERTS)),
        ("all-linear", ("all-linear",), ()),
    ],
)
def test_experts_get_the_adapters_that_are_named(modules: object, taken: tuple, stacks: tuple):
    recipe, made = recipe_of(
        "sft", use_peft=True, lora_target_modules=modules, lora_target_parameters=EXPERTS
    )
    assert recipe.model.adapter is not None
    assert recipe.model.adapter.target_modules == taken
    assert recipe.model.adapter.target_parameters == stacks
    assert lost(made) == (set() if stacks else {"lora_target_parameters"})


@pytest.mark.parametrize(
    ("method", "config", "reported"),
    [
        ("sft", {"torch_compile": True}, {"torch_compile"}),
        ("sft", {"push_to_hub": True, "hub_model_id": "a/b"}, {"push_to_hub", "hub_model_id"}),
        ("sft", {"lora_r": 8}, {"lora_r"}),
        ("sft", {"lora_target_parameters": EXPERTS}, {"lora_target_parameters"}),
        ("sft", {"beta": 0.1, "desirable_weight": 2.0}, {"beta", "desirable_weight"}),
        ("sft", {"optim": "galore_adamw"}, {"optim"}),
        ("sft", {"lr_scheduler_type": "polynomial"}, {"lr_scheduler_type"}),
        ("sft", {"report_to": ["wandb", "comet_ml"]}, {"report_to"}),
        ("sft", {"max_seq_lenght": 512}, {"max_seq_lenght"}),
        ("dpo", {"reward_funcs": ["a.b"]}, {"reward_funcs"}),
        ("grpo", {"vllm_mode": "server"}, {"vllm_mode"}),
        ("grpo", {"reward_funcs": ["accuracy_reward"]}, {"reward_funcs"}),
        ("kto", {"loss_weights": [1.0]}, {"loss_weights"}),
        ("sft", {"lmbda": 0.5}, {"lmbda"}),
        ("distill", {"seq_kd": True, "packing": True}, {"seq_kd", "packing"}),
        (
            "distill",
            {"teacher_model_init_kwargs": {"dtype": "float16", "revision": "a"}},
            {"teacher_model_init_kwargs"},
        ),
    ],
)
def test_what_has_no_counterpart_is_reported(method: str, config: dict[str, object], reported: set[str]):
    assert lost(recipe_of(method, **config)[1]) == reported


def test_a_file_says_what_was_not_carried_over_and_where_it_came_from(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: some/rows\nlearning_rate: 2.0e-4\n"
        "packing: true\nuse_peft: true\nlora_target_modules: [q_proj, v_proj]\ntorch_compile: true\n"
        "num_processes: 2\n"
    )
    made = import_config(file, "sft", None)
    assert not made.faults
    assert made.text.startswith("# From run.yaml, a configuration of TRL's sft")
    assert "# not carried over: torch_compile: true" in made.text
    recipe = load_text(made.text, "recipe.yaml").recipe
    assert (recipe.optim.lr, recipe.length.packing, recipe.train.batch_size) == (2e-4, "bfd", 16)
    assert recipe.model.adapter is not None
    assert recipe.model.adapter.target_modules == ("q_proj", "v_proj")


def test_what_the_recipe_lacks_is_reported(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen3-0.6B\n")
    assert "data" in str(import_config(file, "sft", None).faults)


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n", "a: !!python/object:x {}\n"])
def test_a_file_that_is_none_is_reported(text: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError):
        import_config(file, "sft", None)


def test_a_recipe_is_not_taken_for_a_configuration(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("method: sft\nmodel: {path: x}\n")
    with pytest.raises(RecipeError, match="already"):
        import_config(file, "sft", None)


def test_the_page_of_trls_keys_is_up_to_date():
    assert (ROOT / "docs" / "coming-from-trl.md").read_text() == trl_page(), "run make docs-reference"


def test_every_key_is_on_the_page():
    page = trl_page()
    assert [key for key in KEYS if f"| `{key}` |" not in page] == []


@pytest.mark.parametrize("is_asked", [False, True])
def test_full_determinism_is_kept(is_asked: bool):
    """On a GPU the same recipe gives the same bits only with it."""
    assert recipe_of("sft", full_determinism=is_asked)[0].train.deterministic is is_asked


COMMAND = "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name some/rows"


def test_a_command_trains_what_its_script_does():
    for script, method in [
        ("trl/scripts/sft.py", "sft"),
        ("examples/scripts/reward_modeling.py", "reward"),
        ("examples/scripts/gkd.py --teacher_model_name_or_path Qwen/Qwen3-4B", "distill"),
        ("scripts/run_dpo.py", "dpo"),
        ("scripts/orpo.py", "orpo"),
        ("examples/scripts/cpo.py", "cpo"),
        ("examples/scripts/gspo.py --reward_funcs my.rewards.good", "grpo"),
    ]:
        foreign = read_foreign(f"accelerate launch {script} {COMMAND}")
        assert foreign.method == method, script
        assert not imported(foreign).faults, script


def test_a_command_of_a_trainer_that_is_not_read_is_refused():
    """ppo, bco and their kin became sft, and online_dpo became dpo."""
    for script in ("ppo/ppo", "prm", "bco", "nash_md", "xpo", "gold", "tpo", "sdft", "sdpo", "online_dpo"):
        with pytest.raises(RecipeError, match="is not read"):
            read_foreign(f"python examples/scripts/{script}.py {COMMAND}")


def test_the_folder_and_the_keys_of_a_file_say_its_method_before_its_name(tmp_path: Path):
    text = "model_name_or_path: a/b\ndataset_name: c/d\nper_device_train_batch_size: 2\n"
    for folder, name, more, method in [
        ("sft", "config_distill.yaml", "", "sft"),
        ("orpo", "config_full.yaml", "beta: 0.05\n", "orpo"),
        ("any", "config_distill.yaml", "", "sft"),
        ("any", "teach.yaml", "teacher_model_name_or_path: e/f\n", "distill"),
        ("any", "sft_then.yaml", "num_generations: 8\nreward_funcs: [m.f]\n", "grpo"),
        ("any", "dpo.yaml", "", "dpo"),
    ]:
        file = tmp_path / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + more)
        assert read_foreign(str(file), "trl").method == method, name
    (tmp_path / "any" / "bco.yaml").write_text(text)
    with pytest.raises(RecipeError, match="TRL's bco is not read"):
        read_foreign(str(tmp_path / "any" / "bco.yaml"), "trl")


@pytest.mark.parametrize(
    ("trainer", "config", "loss", "weights"),
    [
        ("orpo", {"beta": 0.05}, ("sft", "orpo"), (1.0, 0.05)),
        ("orpo", {}, ("sft", "orpo"), (1.0, 0.1)),
        ("cpo", {}, ("sft", "cpo"), (1.0, 1.0)),
        ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.2}, ("simpo",), ()),
        ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.3}, ("sft", "simpo"), (0.3, 1.0)),
        ("dpo", {"rpo_alpha": 0.2}, ("sft", "sigmoid"), (0.2, 1.0)),
    ],
)
def test_the_likelihood_beside_a_loss_of_pairs_keeps_its_weight(trainer: str, config, loss, weights):
    recipe, made = recipe_of(trainer, **config)
    assert recipe.dpo is not None
    assert (recipe.dpo.loss, recipe.dpo.loss_weights) == (loss, weights)
    assert recipe.dpo.simpo_gamma == config.get("simpo_gamma", 0.5)
    assert lost(made) == set()


def test_a_loss_of_cpo_that_is_not_here_is_refused():
    with pytest.raises(RecipeError, match="hinge of TRL's CPO"):
        recipe_of("cpo", loss_type="hinge")


def test_a_mixture_of_the_handbook_becomes_sources_and_held_out_rows():
    one = {"id": "a/b", "config": "default", "split": "train_prefs", "columns": ["chosen"], "weight": 1.0}
    mixture = {"datasets": [one, {"id": "c/d", "weight": 0.5}], "test_split_size": 0.05, "seed": 0}
    recipe, made = recipe_of("sft", dataset_mixture=mixture)
    assert [(one.source, one.split) for one in recipe.data.train] == [
        ("a/b", "train_prefs"),
        ("c/d", "train"),
    ]
    assert recipe.data.eval_fraction == 0.05
    assert [one.why for one in made.lost] == ["0.5 of the rows of c/d (`limit` takes a number of them)"]


def test_what_is_packed_is_packed_by_a_word_of_ours():
    for asked, ours, cross in [
        ("ffd", "bfd", False),
        ("wrapped", "wrapped", True),
        ("bfd_split", "bfd_split", False),
    ]:
        recipe, _ = recipe_of("sft", packing=True, packing_strategy=asked)
        assert (recipe.length.packing, recipe.length.cross_document_attention) == (ours, cross)


def test_a_value_as_long_as_a_template_is_not_told_whole(tmp_path: Path):
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: a/b\ndataset_name: c/d\nchat_template: " + "x" * 5000)
    made = import_config(file, "sft", None)
    assert len(made.text) < 1500
    assert any("`model.chat_template`" in note and len(note) < 400 for note in made.notes)


def test_the_engine_of_an_adapter_is_one_that_keeps_its_bits(tmp_path: Path):
    """ZeRO beside an adapter, and vLLM beside shards, are refused by the plan."""
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: [m.f]\naccelerate_config: zero3\n"
        "use_peft: true\nuse_vllm: true\nnum_processes: 4\n"
    )
    recipe = import_config(file, "grpo", None).whole()
    assert recipe.cluster.engine == "fsdp2"
    assert recipe.generation.backend != "vllm"
