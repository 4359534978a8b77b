"""verl's configurations: the method, the loss, the steps and the lengths that they train with."""

from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.importers.importing import TOOLS, Foreign, Imported, import_config, read_foreign
from memtrain.recipes.recipe import Recipe

AR = "actor_rollout_ref"
ACTOR = f"{AR}.actor"
BASE = {
    f"{AR}.model.path": "Qwen/Qwen2.5-7B",
    "algorithm.adv_estimator": "grpo",
    f"{AR}.rollout.n": 4,
    f"{AR}.rollout.name": "vllm",
    "data.train_files": "a.parquet",
}


def of_keys(keys: dict[str, object], processes: int = 1) -> tuple[Recipe, Imported]:
    made = import_config(Foreign(TOOLS["verl"], BASE | keys, None, processes, "run"))
    assert made.faults == []
    return made.whole(), made


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"loss": "dapo", "delta": 3.0, "clip_low": 0.2}),
        ({f"{ACTOR}.clip_ratio": 0.1}, {"clip_low": 0.1, "clip_high": None}),
        (
            {f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.28},
            {"clip_low": 0.1, "clip_high": 0.28},
        ),
        ({f"{ACTOR}.clip_ratio_c": 10.0}, {"delta": 10.0}),
        ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}, {"loss": "luspo"}),
        ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, {"loss": "grpo"}),
        ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}, {"loss": "dr_grpo"}),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_low": 3e-4},
            {"loss": "grpo", "level": "sequence", "clip_low": 3e-4, "delta": None},
        ),
        (
            {
                f"{ACTOR}.policy_loss.loss_mode": "cispo",
                f"{ACTOR}.clip_ratio_low": 10,
                f"{ACTOR}.clip_ratio_high": 0.5,
            },
            {"loss": "cispo", "cispo_max_weight": 1.5},
        ),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_neg": 2.0},
            {"loss": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0},
        ),
        ({f"{ACTOR}.use_kl_loss": True}, {"beta": 0.001, "kl": "k3", "unbiased_kl": False}),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "mse"}, {"kl": "k2"}),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "low_var_kl+"}, {"kl": "k2"}),
        ({f"{ACTOR}.entropy_coeff": 0.01}, {"entropy_coef": 0.01}),
        ({"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}, {"scale_rewards": "batch"}),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, {"scale_rewards": "none"}),
    ],
)
def test_the_loss_is_the_one_of_its_mode(keys: dict[str, object], expected: dict[str, object]):
    recipe, made = of_keys(keys)
    assert recipe.grpo is not None
    assert {name: getattr(recipe.grpo, name) for name in expected} == expected
    assert not any(key in line for key in keys for line in made.notes)


@pytest.mark.parametrize(
    ("estimator", "beta"), [("rloo", {"rloo": 0.02}), ("gae", {"ppo": 0.02}), ("grpo", {"grpo": 0.0})]
)
def test_kl_in_the_reward_is_the_methods_own(estimator: str, beta: dict[str, float]):
    keys: dict[str, object] = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02}
    recipe, made = of_keys(keys | {"algorithm.adv_estimator": estimator})
    ((method, value),) = beta.items()
    assert recipe.method == method
    assert getattr(recipe, method).beta == value
    assert any(line.startswith("algorithm.use_kl_in_reward") for line in made.notes) == (method == "grpo")


def test_its_ppo_has_a_value_model_of_its_own():
    keys: dict[str, object] = {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.95,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        f"{AR}.rollout.n": 1,
        f"{ACTOR}.ppo_epochs": 2,
        "reward_model.enable": True,
        "reward_model.model.path": "some/judge",
    }
    recipe, _ = of_keys(keys, 8)
    assert recipe.ppo is not None
    made = recipe.ppo
    assert (made.value, made.value_clip, made.gae_lambda, made.kl_target) == ("own", 0.5, 0.95, 0.1)
    assert (made.updates_per_rollout, made.steps_per_rollout, recipe.train.batch_size) == (2, 4, 256)
    assert recipe.rewards is not None
    assert [one.path for one in recipe.rewards.models] == ["some/judge"]


@pytest.mark.parametrize(
    ("prompts", "mini", "epochs", "window"),
    [(1024, 256, 1, 4), (128, 256, 1, 1), (96, 32, 2, 6), (100, 32, 1, 4)],
)
def test_its_steps_are_counted_in_updates(prompts: int, mini: int, epochs: int, window: int):
    keys: dict[str, object] = {
        "data.train_batch_size": prompts,
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ACTOR}.ppo_epochs": epochs,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3,
        f"{ACTOR}.optim.lr_warmup_steps": 5,
        "trainer.total_training_steps": 10,
        "trainer.save_freq": 2,
    }
    recipe, made = of_keys(keys, 8)
    assert recipe.train.batch_size == min(prompts, mini) * 4
    assert recipe.grpo is not None
    assert recipe.grpo.steps_in_window == window
    counted = (recipe.train.max_steps, recipe.optim.warmup_steps, recipe.save.every_steps)
    assert counted == (10 * window, 5 * window, 2 * window)
    assert made.pins["train.micro_batch_size"] == 3


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({}, (1024, 512, None)),
        ({"data.max_prompt_length": 1000, "data.max_response_length": 3000}, (4000, 1000, None)),
        ({"data.filter_overlong_prompts": True}, (1024, 512, "drop")),
        ({"data.truncation": "left"}, (1024, 512, "keep_end")),
    ],
)
def test_lengths_are_known(keys: dict[str, object], length: tuple[object, ...]):
    recipe, _ = of_keys(keys)
    assert (recipe.length.max_length, recipe.length.max_prompt, recipe.length.truncation) == length


@pytest.mark.parametrize(
    ("keys", "processes"),
    [({}, 8), ({"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2}, 8), ({"trainer.n_gpus_per_node": 1}, 1)],
)
def test_devices_are_written(keys: dict[str, object], processes: int):
    recipe, _ = of_keys(keys)
    assert recipe.cluster.processes == processes


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({f"{ACTOR}.clip_ratio_low": 10}, "clip_ratio_low"),
        ({f"{ACTOR}.clip_ratio_high": "wide"}, "clip_ratio_high"),
        ({"data.train_batch_size": 0}, "train_batch_size"),
        ({f"{ACTOR}.ppo_mini_batch_size": "many"}, "ppo_mini_batch_size"),
        ({f"{AR}.rollout.n": 1.5}, "rollout.n"),
        ({"data.max_response_length": "$((1024"}, "max_response_length"),
        ({f"{ACTOR}.optim.lr": "fast"}, "optim.lr"),
        ({f"{ACTOR}.loss_agg_mode": "mean"}, "loss_agg_mode"),
        ({"algorithm.adv_estimator": "remax"}, "remax"),
        ({"algorithm.adv_estimator": "grpo_passk"}, "grpo_passk"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_place(keys: dict[str, object], words: str):
    with pytest.raises(RecipeError, match=words):
        of_keys(keys)


def test_a_row_is_shared_where_there_are_devices_for_it():
    keys: dict[str, object] = {f"{ACTOR}.ulysses_sequence_parallel_size": 4}
    assert of_keys(keys | {"trainer.n_gpus_per_node": 8})[0].cluster.context_parallel == 4
    recipe, made = of_keys(keys | {"trainer.n_gpus_per_node": 2})
    assert recipe.cluster.context_parallel == 1
    assert any("4 devices share a row" in line for line in made.notes)


def of_words(trainer: str, words: str) -> Recipe:
    return import_config(
        read_foreign(f"torchrun -m verl.trainer.{trainer} data.train_files=a.parquet {words}")
    ).whole()


def test_its_fine_tuning_has_the_defaults_of_its_trainer():
    old = of_words("fsdp_sft_trainer", "model.partial_pretrain=a/b")
    assert (old.optim.lr, old.optim.schedule, old.optim.warmup_ratio) == (1e-5, "cosine", 0.1)
    assert (old.optim.betas, old.train.epochs, old.train.seed) == ((0.9, 0.95), 4, 1)
    assert (old.train.batch_size, old.length.max_length) == (256, 1024)
    new = of_words("sft_trainer", "model.path=a/b")
    assert (new.model.path, new.optim.lr, new.optim.schedule, new.optim.warmup_ratio) == (
        "a/b",
        1e-3,
        "constant",
        None,
    )


def test_the_engine_of_its_newer_fine_tuning_is_read():
    words = "model.path=a/b engine=fsdp optim=fsdp engine.strategy=fsdp2 engine.fsdp_size=-1"
    words += " engine.param_offload=True trainer.n_gpus_per_node=4 engine.ulysses_sequence_parallel_size=2"
    cluster = of_words("sft_trainer", words).cluster
    assert (cluster.processes, cluster.context_parallel, cluster.cpu_offload) == (4, 2, "parameters")


def test_columns_inside_of_columns_are_named():
    words = (
        "model.partial_pretrain=a/b data.prompt_key=extra_info data.response_key=extra_info "
        "+data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer']"
    )
    made = import_config(
        read_foreign(f"torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet {words}")
    )
    columns = made.whole().data.columns
    assert (columns.prompt, columns.completion) == ("question", "answer")
    assert any("extra_info.question" in line for line in made.notes)


def test_conversations_are_read_by_their_column():
    words = "model.partial_pretrain=a/b data.multiturn.enable=true data.multiturn.messages_key=chat"
    data = of_words("fsdp_sft_trainer", words).data
    assert (data.columns.messages, data.assistant_only_loss, data.strings_are) == ("chat", True, None)


def test_values_of_other_keys_are_put_in_and_unknown_ones_named():
    words = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
        f"{AR}.model.path=a/b {AR}.rollout.n=4 data.max_response_length=100 "
        "'data.max_prompt_length=${data.max_response_length}' 'trainer.project_name=${nowhere.name}'"
    )
    made = import_config(read_foreign(words))
    assert made.whole().length.max_prompt == 100
    assert "${nowhere.name}" in made.notes[0]


def test_the_file_that_a_command_names_is_read(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 100, max_response_length: 200}\n"
    )
    start = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
    start += f"{AR}.model.path=a/b {AR}.rollout.n=4 data.max_prompt_length=50 --config-name=mine "
    length = import_config(read_foreign(f"{start} --config-path={tmp_path}")).whole().length
    assert (length.max_prompt, length.max_length) == (50, 250)
    made = import_config(read_foreign(start))
    assert any(line.startswith("config_name: mine is not carried over") for line in made.notes)
