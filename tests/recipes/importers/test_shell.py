"""Commands as people paste them: shell scripts, their variables, and logs of them."""

from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.importers.command_line import read_command
from memtrain.recipes.importers.importing import import_config, read_foreign

TRAINS = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "


def keys_of(text: str) -> dict[str, object]:
    return read_command(text, "run.sh").keys


@pytest.mark.parametrize(
    "before",
    [
        'export MODEL="Qwen/Qwen3-8B" # e.g. Qwen/Qwen3-4B',
        "MODEL='Qwen/Qwen3-8B'",
        "export A=1 MODEL=Qwen/Qwen3-8B",
        "OWNER=Qwen\nMODEL=$OWNER/Qwen3-8B",
        "MODEL=${1:-Qwen/Qwen3-8B}",
        "+ MODEL=Qwen/Qwen3-8B",
    ],
)
def test_a_variable_is_read_as_the_shell_reads_it(before: str):
    assert keys_of(f"{before}\n{TRAINS}actor_rollout_ref.model.path=$MODEL $@\n") == {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    }


@pytest.mark.parametrize(
    ("start", "processes"),
    [
        ("accelerate launch --num_machines 2 --num_processes 16", 16),
        ("torchrun --nnodes 2 --nproc_per_node 4", 8),
        ("deepspeed --num_nodes 2 --num_gpus 4", 8),
        ("FORCE_TORCHRUN=1 NNODES=1 NPROC_PER_NODE=2 llamafactory-cli", 2),
        ("export NNODES=2\nexport NPROC_PER_NODE=4\nCUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli", 8),
        ("export CUDA_VISIBLE_DEVICES=0,1,2\npython", 3),
        ("NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=4 torchrun --nproc_per_node 1", 1),
        ("python", None),
    ],
)
def test_devices_are_those_of_all_nodes(start: str, processes: int | None):
    """accelerate counts those of all its machines, and was multiplied; LLaMA-Factory's were not read."""
    assert read_command(f"{start} train.py --max_length 512", "run.sh").processes == processes


def test_a_default_stands_where_nothing_sets_the_variable(monkeypatch: pytest.MonkeyPatch):
    text = "python train.py --max_length ${ROWS:-2048} --lr ${RATE-1e-5}"
    assert keys_of(text) == {"max_length": 2048, "lr": 1e-5}
    monkeypatch.setenv("ROWS", "512")
    assert keys_of(text)["max_length"] == 512
    assert keys_of(f"ROWS=256\n{text}")["max_length"] == 256


@pytest.mark.parametrize(
    "text",
    [
        'ARGS="\n    --nproc_per_node 4 \\\n    --nnodes 1\n"\ntorchrun $ARGS train.py --max_length 512',
        "ARGS=(\n  --nproc_per_node 4  # cards\n  --nnodes 1\n)\n"
        'torchrun "${ARGS[@]}" train.py --max_length 512',
        "+ torchrun --nproc_per_node 4 train.py --max_length 512",
    ],
)
def test_arguments_are_held_in_variables_over_several_lines(text: str):
    read = read_command(text, "run.sh")
    assert (read.keys, read.processes) == ({"max_length": 512}, 4)


def test_what_nothing_sets_is_left_out_and_told():
    """The last part of a path without a variable stays: it tells the model, and DeepSpeed's stage."""
    read = read_command(
        "python dpo.py --model_name_or_path $ROOT/Qwen3-8B --deepspeed ${HERE}/zero3.json --max_length $LONG "
        "--output_dir ${HERE}/out_$NAME --beta 0.1",
        "run.sh",
    )
    assert read.keys == {"model_name_or_path": "Qwen3-8B", "deepspeed": "zero3.json", "beta": 0.1}
    assert read.unset == {"max_length": "$LONG", "output_dir": "${HERE}/out_$NAME"}


def test_a_recipe_says_which_variables_nothing_sets():
    foreign = read_foreign("trl dpo --model_name_or_path Qwen/Qwen3-8B --max_length $LONG --beta $BETA")
    made = import_config(foreign)
    assert made.notes[0].startswith("Nothing sets $LONG (max_length), $BETA (beta): the defaults are taken")
    written = [line for line in made.text.splitlines() if not line.startswith("#")]
    assert not any("$" in line for line in written)


def test_a_log_of_a_script_is_read(tmp_path: Path):
    log = tmp_path / "run.log"
    log.write_text(f"+ export NCCL_DEBUG=WARN\n+ NCCL_DEBUG=WARN\n+ {TRAINS}trainer.n_gpus_per_node=8\n")
    assert read_foreign(str(log)).tool.name == "verl"


@pytest.mark.parametrize("launcher", ["trl sft", "accelerate launch sft.py", "python src/open_r1/sft.py"])
def test_the_file_of_a_command_is_read(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """TRL's own way: `trl sft --config my.yaml`; an argument after it wins."""
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\nmax_length: 4096\npacking: false\n")
    read = read_foreign(f"{launcher} --config my.yaml --packing true")
    assert dict(read.config) == {
        "model_name_or_path": "Qwen/Qwen3-8B",
        "max_length": 4096,
        "packing": True,
    }
    assert (read.tool.name, read.method) == ("trl", "sft")


def test_sentences_beside_a_command_are_passed_over(tmp_path: Path):
    """A paste from a thread: its apostrophes are no quotes, and hold no command."""
    text = "Here's my command:\ntrl sft --model_name_or_path a/b --max_length 512\nIt doesn't fit.\n"
    (tmp_path / "paste.txt").write_text(text)
    assert dict(read_foreign(str(tmp_path / "paste.txt")).config) == {
        "model_name_or_path": "a/b",
        "max_length": 512,
    }


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("X=$((1024 * (2 + 1)))", 3072),
        ("A=3 B=4\nX=$(((A + $B) * 2))", 14),
        ("A=7\nX=$((A / 2 - 7 % 4 + 2**3))", 8),
        ("X=${NOT_SET_1:-${NOT_SET_2:-8}}", 8),
        ('X=${NOT_SET_1:-"${HOME:+set}/x"}', "set/x"),
        (': "${X:=9}"', 9),
        ("P=/a/b/c.yaml\nX=${P##*/}", "c.yaml"),
        ("P=/a/b/c.yaml\nX=${P%/*}", "/a/b"),
        ("P=a-b\nX=${P//-/_}", "a_b"),
        ("P=aB\nX=${P^^}", "AB"),
        ("A=(1 2)\nA+=(3)\nX=${#A[@]}", 3),
        ("A=(1 22 3)\nX=${A[1]}", 22),
        ("M=b\nif [ $M = a ]; then\n  X=1\nelif [[ $M == b && -n $M ]]; then\n  X=2\nelse\n  X=3\nfi", 2),
        ("M=b; if [ $M != b ]; then X=1; else X=2; fi", 2),
        ("N=4\n[ $N -gt 2 ] && X=1\n[ $N -gt 8 ] && X=2", 1),
        ("M=c\ncase $M in\n  a|b) X=1 ;;\n  c|d)\n    X=2\n    ;;\n  *) X=3 ;;\nesac", 2),
        ("ON=true\nX=1\nif $ON; then X=2; fi", 2),
        ("for X in 5; do", 5),
        ("cat <<EOF > a.txt\nit's X=3\nEOF\nX=4", 4),
        ("export X='a b' # it's", "a b"),
        ("X=1; exit_code=0", 1),
        ('X="it\'s"', "it's"),
    ],
)
def test_what_a_script_sets_is_known(before: str, value: object):
    assert keys_of(f'{before}\n{TRAINS}x.y="$X"')["x.y"] == value


@pytest.mark.parametrize(
    "before",
    [
        "X=$(nvidia-smi | wc -l)",
        "X=`date`",
        "X=$1",
        "X=$((NOT_SET_1 / 2))",
        "X=$((9**9**9))",
        "X=1\nif [ -d /data ]; then X=2; fi",
        "X=1\ncase $1 in a) X=2 ;; esac",
        "for X in 1 2; do",
        "X=1\n[ $# -gt 1 ] && X=2",
        "A=a\n" + "A=$A$A\n" * 60 + "X=$A",
    ],
)
def test_what_only_running_it_would_tell_is_left_out_and_told(before: str):
    read = read_command(f'{before}\n{TRAINS}x.y="$X"', "run.sh")
    assert "x.y" not in read.keys
    assert "x.y" in read.unset


def test_a_branch_that_nothing_decides_is_refused():
    branches = f"if [ -d /fast ]; then\n  {TRAINS}a.b=1\nelse\n  {TRAINS}a.b=2\nfi\n"
    with pytest.raises(RecipeError, match="-d /fast"):
        read_command(branches, "run.sh")
    assert keys_of(f"M=1\n{branches.replace('-d /fast', '$M = 1')}")["a.b"] == 1
    assert keys_of(f"{branches.replace('else', 'fi').removesuffix('fi' + chr(10))}")["a.b"] == 1


def test_the_end_of_a_script_and_a_key_that_is_taken_out():
    assert keys_of(
        f"{TRAINS}a.b=1 c.d=2 ~c.d 2>&1 | tee run.log --append x\nexit 0\n{TRAINS}a.b=2 c.d=2 e.f=3"
    ) == {
        "algorithm.adv_estimator": "grpo",
        "a.b": 1,
    }


def test_arrays_keep_their_words():
    read = keys_of("A=(a.b=\"x y\" c.d='${e.f}')\n" + TRAINS + '"${A[@]}"')
    assert (read["a.b"], read["c.d"]) == ("x y", "${e.f}")


def test_quotes_that_never_close_are_told():
    with pytest.raises(RecipeError, match="No closing quotation"):
        read_command("python train.py --name 'open\n--max_length 3", "run.sh")


def test_a_quoted_text_is_no_redirection(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python sft.py --model_name_or_path a/b --dataset_name c/d --output_dir '>x' "
        "--eos_token '<|im_end|>' --seed 7 "
        '>"log.txt" 2>&1\n'
    )
    config = read_foreign(str(script)).config
    assert (config["eos_token"], config["output_dir"], config["seed"]) == ("<|im_end|>", ">x", 7)
