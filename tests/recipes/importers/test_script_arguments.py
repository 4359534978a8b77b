"""Arguments of a script's own: defaults of its parser, and what a command gives of them."""

from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.importers.importing import Imported, import_config, read_foreign

TRAIN = """
args = SFTConfig(per_device_train_batch_size={0}batch_size, gradient_checkpointing={0}ckpt, max_length=512)
model = Qwen3ForCausalLM.from_pretrained({0}name, torch_dtype=torch.bfloat16)
SFTTrainer(model=model, args=args, train_dataset=load_dataset("json", data_files={0}rows)).train()
"""
ARGPARSE = """
import argparse
def read():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="a/small")
    parser.add_argument("-b", "--batch-size", type=int, default="2")
    parser.add_argument("--ckpt", action="store_true")
    parser.add_argument("--no-sync", dest="sync", action="store_false")
    parser.add_argument("--rows", required=True)
    return parser.parse_args()
def work(given):
    {train}
read_once = read()
work(read_once)
"""
CLASSES = """
from dataclasses import dataclass, field
@dataclass
class Base:
    name: str = field(default="a/small", metadata={{"help": "the model"}})
    rows: str = field(metadata={{"help": "the data"}})
@dataclass
class Mine(Base):
    batch_size: int = 2
    ckpt: bool = False
@dataclass
class Other:
    ckpt: bool = True
{parser}
{train}
"""
PARSERS = {
    "one": "given = HfArgumentParser(Mine).parse_args_into_dataclasses()[0]",
    "several": "parser = TrlParser((Other, Mine))\nother, given = parser.parse_args_and_config()",
    "second": "parser = HfArgumentParser([Other, Mine])\ngiven = parser.parse_args_into_dataclasses()[1]",
    "tyro": "given = tyro.cli(Mine)",
}
FIRE = """
def train(name='a/small', *, batch_size: int = 2, ckpt=False, rows=None):
    {train}
fire.Fire(train)
"""
INDENTED = TRAIN.replace("\n", "\n    ")
SCRIPTS = {
    "argparse": ARGPARSE.format(train=INDENTED.format("given.")),
    **{name: CLASSES.format(parser=one, train=TRAIN.format("given.")) for name, one in PARSERS.items()},
    "fire": FIRE.format(train=INDENTED.format("")),
}


def imported(source: str) -> Imported:
    return import_config(read_foreign(source), has_stand_ins=True)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_arguments_have_the_defaults_of_the_scripts_own_parser(kind: str, tmp_path: Path):
    """They were "computed when the script runs", the model too, and no recipe could be written."""
    (tmp_path / "train.py").write_text(SCRIPTS[kind])
    made = imported(str(tmp_path / "train.py"))
    recipe = made.whole()
    assert (recipe.model.path, recipe.train.batch_size) == ("a/small", 2)
    assert recipe.memory.activation_checkpointing == "off"
    said = " ".join(made.notes)
    assert "have their defaults (" in said
    assert "batch_size" in said.partition("have their defaults (")[2].partition(")")[0]
    computed = "rows is not carried over: its value is computed when the script runs" in said
    assert computed is (kind != "fire"), "It has no default, and its text is no source."


@pytest.mark.parametrize("kind", SCRIPTS)
def test_arguments_of_a_command_are_those_of_its_script(kind: str, tmp_path: Path, monkeypatch):
    """`--batch-size` was no key of TRL's, and the command told no tool."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPTS[kind])
    made = imported("torchrun --nproc_per_node 2 train.py --batch-size 4 --ckpt --rows my.jsonl")
    recipe = made.whole()
    assert (recipe.train.batch_size, recipe.memory.activation_checkpointing) == (8, "on")
    assert [one.source for one in recipe.data.train] == ["my.jsonl"]  # pyright: ignore[reportOptionalIterable]
    assert "batch_size" not in " ".join(made.notes)


def test_a_variable_of_the_environment_has_its_default_and_a_text_its_values(tmp_path: Path):
    script = "size = 4\nname = os.environ.get('MODEL', f'a/{'small'}-{size}B')\nrows = os.getenv('ROWS')\n"
    script += (
        "SFTTrainer(model=name, args=SFTConfig(output_dir=f'o/{rows}', seed=int(os.getenv('S', '1'))))\n"
    )
    (tmp_path / "train.py").write_text(script.replace("{'small'}", "small"))
    made = imported(str(tmp_path / "train.py"))
    assert made.whole().model.path == "a/small-4B"
    assert "output_dir: f'o/{rows}' is not carried over" in " ".join(made.notes), "Nothing says the rows."


def test_a_model_that_is_computed_is_asked_for_by_its_option(tmp_path: Path):
    (tmp_path / "train.py").write_text("SFTTrainer(model=sys.argv[1], args=SFTConfig(max_length=64))\n")
    with pytest.raises(RecipeError) as refused:
        imported(str(tmp_path / "train.py")).whole()
    assert [one.fix for one in refused.value.faults] == ["name the model: --model owner/name"]


def test_classes_that_hold_constants_are_read_and_are_no_value_themselves(tmp_path: Path):
    script = "class CFG:\n    name, rate = 'a/b', 1\n    batch_size = 3\n    name = 'a/small'\n"
    script += "trainer = SFTTrainer(model=CFG.name, callbacks=[CFG], args=SFTConfig("
    (tmp_path / "train.py").write_text(f"{script}per_device_train_batch_size=CFG.batch_size))\n")
    made = imported(str(tmp_path / "train.py"))
    assert (made.whole().model.path, made.whole().train.batch_size) == ("a/small", 3)
    assert "have their defaults" not in " ".join(made.notes)
    assert "callbacks: '[CFG]'" in " ".join(made.notes)
