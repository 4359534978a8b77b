"""What a script calls decides: the trainer, the model that it is given, its rows and its rewards."""

import json
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.importers.importing import Foreign, Imported, import_config, read_foreign
from memtrain.recipes.recipe import Recipe

FAST = (
    "from unsloth import FastLanguageModel\n"
    "model, tokenizer = FastLanguageModel.from_pretrained(model_name='a/model', max_seq_length=1024)\n"
    "model = FastLanguageModel.get_peft_model(model, r=8)\n"
)
RELOAD = (
    "if False:\n    model, tokenizer = FastLanguageModel.from_pretrained('a/reload', max_seq_length=99)\n"
    "model, tokenizer = FastLanguageModel.from_pretrained('a/later', load_in_4bit=False)\n"
)
ROWS = "rows = load_dataset('a/rows', 'small', split='part')\n"
SFT = "trainer = SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(max_steps=3))\n"


def read(folder: Path, text: str, name: str = "train.py", **asked: object) -> Foreign:
    (folder / name).write_text(text)
    return read_foreign(str(folder / name), **asked)  # pyright: ignore[reportArgumentType]


def imported(folder: Path, text: str, **asked: object) -> Imported:
    return import_config(read(folder, text, **asked))


@pytest.mark.parametrize(
    ("trainer", "method", "loss"),
    [
        ("SFT", "sft", ""),
        ("KTO", "kto", ""),
        ("RLOO", "rloo", ""),
        ("GKD", "distill", ""),
        ("Reward", "reward", ""),
        ("ORPO", "dpo", "loss: [sft, orpo]\n  loss_weights: [1.0, 0.3]"),
        ("CPO", "dpo", "loss: [sft, cpo]\n  loss_weights: [1.0, 1.0]\n  beta: 0.3"),
    ],
)
def test_the_trainer_that_is_called_decides_the_method(trainer: str, method: str, loss: str, tmp_path: Path):
    """Also a class of the script's own that extends one, and one under another name."""
    calls = (
        f"args = {trainer}Config(output_dir='o'{', beta=0.3' * bool(loss)})\n"
        "t = {}('a/model', args=args, train_dataset=load_dataset('a/rows'), reward_funcs='a/judge',\n"
        "    teacher_model='a/teacher')\n"
    )
    ways = (
        calls.format(f"trl.{trainer}Trainer"),
        f"class Mine({trainer}Trainer): pass\n{calls.format('Mine')}",
        f"from trl import {trainer}Trainer as T\n{calls.format('T')}",
    )
    for way in ways:
        made = imported(tmp_path, way)
        assert (made.method, made.recipe is not None and made.recipe.model.path) == (method, "a/model")
        assert loss in made.text


@pytest.mark.parametrize(
    "name",
    ["ppo", "prm", "bco", "nash_md", "xpo", "gold", "tpo", "sdft", "sdpo", "online_dpo", "async_grpo"],
)
def test_a_trainer_that_is_not_translated_is_refused(name: str, tmp_path: Path):
    """Their commands became sft, and online_dpo dpo."""
    trainer = {"nash_md": "NashMD", "online_dpo": "OnlineDPO", "async_grpo": "AsyncGRPO"}.get(
        name, name.upper()
    )
    with pytest.raises(RecipeError, match=f"TRL's {name} is not read"):
        read(tmp_path, f"{trainer}Trainer(model='a/b', args={trainer}Config(output_dir='o'))\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Seq2SeqTrainer(model=1)", "calls Seq2SeqTrainer, a trainer that memtrain does not read"),
        ("model = AutoModel.from_pretrained('a/b')\nTrainer(model=model)", "calls Trainer"),
        ("args = TrainingArguments(output_dir='o')", "calls no trainer"),
        ("SFTConfig(seed=1)\nDPOConfig(seed=1)", "configures several trainers: SFTConfig, DPOConfig"),
    ],
)
def test_a_script_whose_trainer_is_not_known_is_refused(text: str, words: str, tmp_path: Path):
    with pytest.raises(RecipeError, match=words):
        read(tmp_path, text)


def test_of_several_trainers_one_is_asked_for(tmp_path: Path):
    """The last one won without a word."""
    both = (
        f"{FAST}{ROWS}{SFT}GRPOTrainer(model=model, train_dataset=load_dataset('b/c'), reward_funcs='a/r')\n"
    )
    with pytest.raises(
        RecipeError, match="trains more than once: SFTTrainer in line 5, GRPOTrainer in line 6"
    ):
        read(tmp_path, both)
    for asked, rows in (({"method": "sft"}, "a/rows"), ({"trainer": 2}, "b/c"), ({"method": "grpo"}, "b/c")):
        assert f"source: {rows}" in imported(tmp_path, both, **asked).text
    with pytest.raises(RecipeError, match="has 2 trainers"):
        read(tmp_path, both, trainer=3)


def test_the_model_is_the_one_that_the_trainer_is_given(tmp_path: Path):
    """A later reload, also under `if False:`, took its place in 84 of 128 notebooks."""
    function = "def load():\n    m = AutoModelForCausalLM.from_pretrained('a/model')\n    return m, 1\n"
    ways = (
        FAST + ROWS + SFT + RELOAD,
        function + ROWS + "model, n = load()\nmodel = model.to('cuda')\n" + SFT + RELOAD,
        f"def main(model, rows):\n    {SFT}{function}{ROWS}main(load()[0], rows=rows)\n{RELOAD}",
    )
    for text in ways:
        recipe = imported(tmp_path, text).whole()
        assert (recipe.model.path, recipe.train.max_steps) == ("a/model", 3)
        assert [(one.source, one.name, one.split) for one in recipe.data.train] == [
            ("a/rows", "small", "part")
        ]  # pyright: ignore[reportOptionalIterable]


def test_branches_are_taken_where_their_test_is_known_and_told_where_not(tmp_path: Path):
    text = "big = {}\nname = 'a/big' if big else 'a/small'\nif big:\n    rows = load_dataset('a/b')\n"
    text += "else:\n    rows = load_dataset('c/d')\nSFTTrainer(model=name, train_dataset=rows)\n"
    known = imported(tmp_path, text.format("len('ab') > 5 or False").replace("len('ab')", "3"))
    assert "path: a/small" in known.text
    assert "source: c/d" in known.text
    assert "first branch" not in " ".join(known.notes)
    open_ = imported(tmp_path, text.format("input()"))
    assert "source: a/b" in open_.text
    assert "its first branch was read: rows (big)" in " ".join(open_.notes)


def test_what_happens_to_rows_and_templates_is_told(tmp_path: Path):
    """`get_chat_template`, `.map(...)` and the collators of answers were read over."""
    render = (
        "def render(batch):\n    return {'text': [tokenizer.apply_chat_template(one, tokenize=False)\n"
        "        for one in batch['conversations']]}\n"
    )
    change = "def change(row):\n    return {'text': 'Q: ' + row['q']}\n"
    template = "tokenizer = get_chat_template(tokenizer, chat_template={!r})\n"
    end = SFT + "trainer = train_on_responses_only(trainer)\n"
    same = FAST + render + ROWS + template.format("chatml") + "rows = rows.map(render, batched=True)\n" + end
    made = imported(tmp_path, same)
    assert made.whole().data.assistant_only_loss
    assert made.whole().model.chat_template == "chatml"
    assert "rows are rendered by the chat template here too" in " ".join(made.notes)
    other = FAST + change + ROWS + template.format("a" * 5000) + "rows = rows.filter(f).map(change)\n" + end
    said = " ".join(imported(tmp_path, other).notes)
    assert "the script's rows: [filter(f), map(change)] is not carried over" in said
    assert "chat_template: a template of the script is not carried over" in said
    assert "aaaa" not in said
    cut = imported(tmp_path, FAST + ROWS.replace("part", "train[:30]") + SFT)
    assert "limit: 30" in cut.text


def test_unsloths_own_defaults_are_taken(tmp_path: Path):
    """Source: `replacements` in unsloth/models/rl.py, arguments in models/loader.py and llama.py."""
    recipe = imported(tmp_path, FAST + ROWS + SFT).whole()
    optim, train = recipe.optim, recipe.train
    assert (train.batch_size, train.seed, optim.weight_decay, optim.kind) == (8, 3407, 0.001, "adamw_8bit")
    assert (optim.warmup_ratio, optim.lr, recipe.length.max_length) == (0.1, 5e-5, 1024)
    assert (recipe.memory.activation_checkpointing, recipe.memory.activation_offloading) == ("on", "on")
    asked = SFT.replace("max_steps=3", "max_steps=3, warmup_steps=5, max_length=64, max_seq_length=2000")
    recipe = imported(tmp_path, FAST + ROWS + asked).whole()
    assert (recipe.optim.warmup_steps, recipe.length.max_length) == (5, 1024)
    general = SFT.replace("SFTConfig", "TrainingArguments")
    recipe = imported(tmp_path, FAST + ROWS + general).whole()
    assert (recipe.train.seed, recipe.train.batch_size) == (42, 8)
    online = "GRPOTrainer(model=model, train_dataset=rows, reward_funcs='a/judge', args=GRPOConfig(\n"
    online += "per_device_train_batch_size=1, gradient_accumulation_steps=3))\n"
    fast = FAST.replace("max_seq", "fast_inference=True, max_seq")
    recipe = imported(tmp_path, fast + ROWS + online).whole()
    grpo = recipe.grpo
    assert grpo is not None
    assert recipe.train.batch_size == 24, "A device's completions are those of a group, where they are fewer."
    assert (grpo.loss, grpo.beta, grpo.importance_correction) == ("bnpo", 0.001, "none")


def test_functions_that_judge_go_into_a_file_beside_the_recipe(tmp_path: Path):
    text = (
        "import re, math\nfrom trl import GRPOTrainer\nSYSTEM = 'x'\nform = re.compile('a')\n"
        "def used(text):\n    return form.match(text)\n"
        "def good(completions, **more):\n    return [float(bool(used(one))) for one in completions]\n"
        "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
        "def bad(completions):\n    return [model(one) for one in completions]\n"
        "GRPOTrainer(model=model, train_dataset=load_dataset('a/rows'), reward_funcs=[good, bad])\n"
    )
    made = import_config(read(tmp_path, text), "out/my.yaml")
    assert "functions: [{function: './my_rewards.py:good'}]" in made.text
    code = made.code["my_rewards.py"]
    assert {"good", "used", "form", "re"} <= set(compile(code, "f", "exec").co_names)
    assert "SYSTEM" not in code
    assert "from_pretrained" not in code
    assert "rewards: not written into a file, with model of the script as it runs: bad" in " ".join(
        made.notes
    )


def test_functions_of_trl_splits_and_the_trainers_own_rounding_are_read(tmp_path: Path):
    """TRL 1.16's trainers take a quantization; two splits are two results of one call."""
    text = (
        "rows, held = load_dataset('a/rows', split=['train[:10]', 'test'])\n"
        "bits = BitsAndBytesConfig(load_in_4bit=True)\n"
        "def own(completions):\n    return [0.0]\n"
        "args = GRPOConfig(reward_weights=[1.0, 2.0], eval_strategy='epoch')\n"
        "GRPOTrainer('a/b', reward_funcs=[own, accuracy_reward], args=args,\n"
        "    train_dataset=rows, eval_dataset=held, quantization_config=bits, peft_config=LoraConfig(r=4))\n"
    )
    recipe = imported(tmp_path, text).whole()
    assert recipe.model.quantize == "4bit"
    assert [(one.split, one.limit) for one in recipe.data.train] == [("train", 10)]  # pyright: ignore[reportOptionalIterable]
    assert [one.split for one in recipe.data.eval] == ["test"]  # pyright: ignore[reportOptionalIterable]
    assert recipe.rewards is not None
    weights = [(one.function, one.weight) for one in recipe.rewards.functions]
    assert weights == [("exact_answer", 2.0), ("./recipe_rewards.py:own", 1.0)]


def test_a_large_notebook_is_read_without_its_pictures(tmp_path: Path):
    cell = {
        "cell_type": "code",
        "source": [FAST, ROWS, SFT],
        "outputs": [{"data": {"image/png": "A" * 2**21}}],
    }
    read(tmp_path, json.dumps({"cells": [cell]}), "run.ipynb")


LONG = (
    "s = 'ab'\n" + "s = f'{s}{s}'\n" * 60,
    "s = [1]\n" + "s = [s, s]\n" * 60,
    "s = 'x'\n" + "s = s + s\n" * 60,
    "def f0(x): return x\n"
    + "".join(f"def f{n}(x): return f{n - 1}(f{n - 1}(x)) + f{n - 1}(x)\n" for n in range(1, 19)),
    "class A0: a = 1\nclass B0: b = 1\n"
    + "".join(
        f"class A{n}(A{n - 1}, B{n - 1}): pass\nclass B{n}(B{n - 1}, A{n - 1}): pass\n" for n in range(1, 40)
    ),
    "".join(f"class C{n}: pass\n" for n in range(1200)),
    "x = " + "-" * 900 + "1\n",
    "x = a" + ".b()" * 900 + "\n",
    "x = " + "(" * 150 + "1" + ")" * 150 + "\n",
)


WAYS_OUT = ("name the script that trains", "name a script that trains once")


@pytest.mark.parametrize("number", range(len(LONG)))
def test_the_work_of_reading_a_script_has_an_end(number: int, tmp_path: Path):
    """Texts that double, classes and functions whose number of ways does, expressions a thousand deep."""
    text = LONG[number] + "f18(1)\nSFTTrainer(model='a/b', train_dataset=load_dataset('a/rows'))\n"
    try:
        recipe = imported(tmp_path, text).whole()
    except RecipeError as refused:
        recipe = refused.faults[0]
    assert isinstance(recipe, Recipe) or recipe.fix in WAYS_OUT
