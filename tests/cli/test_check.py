import json
from pathlib import Path

import pytest

from memtrain.__main__ import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(
        "method: sft\nmodel: {path: builtin:tiny}\ndata:\n  train:\n    - {source: a.jsonl, weight: 2}\n"
        "    - {source: b.jsonl, weight: 1}\nmemory: {budget: 24GiB}\n"
    )
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "2 + 2", "completion": "4"}\n' * 3)
    return tmp_path


def test_a_valid_recipe_is_shown_with_where_each_key_was_said(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "my.yaml", "optim.lr=1e-4", "data.strings_are=text"]) == 0
    assert capsys.readouterr().out == (
        "my.yaml is a valid sft recipe.\n"
        "\n"
        "key               value                                         written at\n"
        "method            sft                                           my.yaml:1:1\n"
        "model.path        builtin:tiny                                  my.yaml:2:9\n"
        "data.train        a.jsonl (weight: 2.0); b.jsonl (weight: 1.0)  my.yaml:4:3\n"
        "data.strings_are  text                                          "
        "from the command line: `data.strings_are=text`\n"
        "memory.budget     24GiB                                         my.yaml:7:10\n"
        "optim.lr          0.0001                                        "
        "from the command line: `optim.lr=1e-4`\n"
        "\n"
        "checked           found\n"
        "model             builtin:tiny: qwen3, 0.9 M parameters; weights are built in\n"
        "tokenizer         1,024 tokens, with a chat template\n"
        "data.train[0]     a.jsonl: format prompt_completion, the first 3 rows can be\n"
        "                  used\n"
        "data.train[1]     b.jsonl: format prompt_completion, the first 3 rows can be\n"
        "                  used\n"
        "data.train, loss  6 of the first 6 rows keep a loss token; 6 have <eos>, which\n"
        "                  ends a text, among their loss tokens\n"
        "\n"
        "Every other key has its default; --all shows them.\n"
    )


def test_strings_beside_a_chat_template_are_told_with_the_way_out(capsys: pytest.CaptureFixture[str]):
    words = ["check", "my.yaml", "data.train=a.jsonl"]
    assert main(words) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "data.train, rendering warning: the rows are strings, which the tokenizer's chat template" in told
    assert main([*words, "data.strings_are=turns"]) == 0
    assert "rendering" not in capsys.readouterr().out


def test_an_evaluation_set_is_shown_by_its_name(capsys: pytest.CaptureFixture[str]):
    words = ["data.train=a.jsonl", "data.eval={math: a.jsonl, chat: [a.jsonl, b.jsonl]}"]
    assert main(["check", "my.yaml", *words]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if ": format " in line]
    assert lines == ["data.train", "data.eval.math", "data.eval.chat[0]", "data.eval.chat[1]"]


def test_a_long_value_does_not_widen_the_table(folder: Path, capsys: pytest.CaptureFixture[str]):
    prompts = ", ".join(f"a prompt of several words, number {at}" for at in range(9))
    text = f"\neval: {{samples: {{prompts: [{prompts}]}}}}\n"
    (folder / "my.yaml").write_text((folder / "my.yaml").read_text() + text)
    assert main(["check", "my.yaml", "data.eval=a.jsonl"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) < 130
    [row] = [line for line in shown if line.startswith("eval.samples.prompts")]
    assert " ...  my.yaml:9:18" in row


def test_all_shows_the_defaults_too(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "my.yaml", "--all"]) == 0
    reported = capsys.readouterr().out
    assert "memory.loss_chunk_size " in reported
    assert reported.count(" default\n") > 50
    assert "default\n" in reported


def test_a_wrong_recipe_ends_with_2_and_every_fault_on_stderr(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "my.yaml").write_text(
        "method: sft\nmodel: {path: builtin:tiny}\ndata: {trian: x}\nlenght: {}\n"
    )
    assert main(["check", "my.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: data.trian: unknown key\n"
        "   at: my.yaml:3:8\n"
        "  try: did you mean 'train'?\n"
        "error: lenght: unknown key\n"
        "   at: my.yaml:4:1\n"
        "  try: did you mean 'length'?\n"
    )


def test_a_shipped_recipe_is_checked_by_its_name(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "sft/qwen3-0.6b-lora"]) == 0
    assert "is a valid sft recipe." in capsys.readouterr().out


def test_faults_of_model_data_and_packages_come_together(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("memtrain.cli.plan.check_run.installed", lambda *names: frozenset())
    (folder / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    (folder / "my.yaml").write_text(
        "method: sft\nmodel: {path: ./none}\ndata:\n  train: [gone.jsonl, bad.jsonl]\n  eval: a.jsonl\n"
        "log: {trackers: [wandb]}\n"
    )
    assert main(["check", "my.yaml"]) == 5
    reported = capsys.readouterr().err
    assert reported.count("error: ") == 4
    for words in (
        "error: there is no folder ./none\n   at: my.yaml:2:9 (model.path)",
        "error: there is no file 'gone.jsonl'\n   at: my.yaml:4:",
        "error: the row has no column 'completion'; it has prompt\n   at: bad.jsonl:2",
        "error: wandb is asked for but not installed\n   at: my.yaml:6:7 (log.trackers)",
    ):
        assert words in reported


def test_a_dataset_of_the_hub_is_not_downloaded(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "my.yaml", "data.train=someone/rows"]) == 0
    assert "not checked: someone/rows is a dataset of the hub" in " ".join(capsys.readouterr().out.split())


def test_a_package_for_cuda_is_asked_for_where_there_is_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = ["check", "my.yaml", "model.liger=on"]
    assert main(words) == 0
    assert "liger_kernel: not checked, there is no CUDA device here" in capsys.readouterr().out
    from memtrain.memory.hardware.devices import Hardware

    monkeypatch.setattr("memtrain.memory.hardware.devices.detect", lambda _: Hardware.named("h100", 1))
    monkeypatch.setattr("memtrain.cli.plan.check_run.installed", lambda *names: frozenset())
    assert main(words) == 5
    assert "error: model.liger needs liger_kernel, which is not installed" in capsys.readouterr().err


def test_a_data_file_in_place_of_a_recipe_is_named_as_such(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "a.jsonl"]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("error: a.jsonl is a data file, not a recipe\n   at: the command line\n")
    assert "memtrain sft a.jsonl --model MODEL" in reported


def test_faults_of_keys_do_not_hide_those_of_the_model_the_data_and_the_packages(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "my.yaml").write_text(
        "method: sft\nmodel: {path: ./nomodel}\ndata: {train: c.jsonl}\ntrain: {epochs: 2, max_steps: 3}\n"
        "log: {trackers: [wandb], evry: 2}\n"
    )
    assert main(["check", "my.yaml"]) == 2
    reported = capsys.readouterr().err
    assert [line for line in reported.splitlines() if line.startswith("error")] == [
        "error: the length of the run is set twice",
        "error: log.evry: unknown key",
        "error: there is no folder ./nomodel",
        "error: there is no file 'c.jsonl'",
        "error: wandb is asked for but not installed",
    ]
    assert "my.yaml:2:9 (model.path)" in reported


@pytest.mark.parametrize(
    ("recipe", "errors"),
    [
        pytest.param(
            "method: sft\nmodel: {path: ./nomodel, dtyp: float32}\n"
            "data: {train: c.jsonl, colums: {text: x}}\n",
            (
                "model.dtyp: unknown key",
                "data.colums: unknown key",
                "there is no folder ./nomodel",
                "there is no file 'c.jsonl'",
            ),
            id="unknown keys",
        ),
        pytest.param(
            "method: sft\nmodel: {path: ./nomodel, dtype: 3}\n"
            "data:\n  train: [{source: c.jsonl, weight: 1}, a.jsonl]\n"
            "  eval: {math: d.jsonl, chat: a.jsonl}\n",
            (
                "model.dtype: 3; it must be",
                "only some sources of data.train have a weight",
                "there is no folder ./nomodel",
                "there is no file 'c.jsonl'",
                "there is no file 'd.jsonl'",
            ),
            id="wrong values and broken rules",
        ),
        pytest.param(
            "method: sft\nmodel: {path: 3, config: gone.json}\ndata: {train: {source: [x]}, eval: d.jsonl}\n",
            (
                "model.config has no tokenizer",
                "model.path: ",
                "data.train.0.source: a list was given",
                "gone.json",
                "there is no file 'd.jsonl'",
            ),
            id="paths that are at fault themselves",
        ),
    ],
)
def test_a_missing_model_or_file_is_told_beside_another_fault_of_its_section(
    recipe: str, errors: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "my.yaml").write_text(recipe)
    assert main(["check", "my.yaml"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == len(errors), lines
    for line, words in zip(lines, errors, strict=True):
        assert words in line


WRONG_METHOD = """method: {method}
model: {{path: ./none}}
data: {{train: gone.jsonl}}
length: {{max_lenght: 3}}
train: {{epochs: 1, max_steps: 2, batch_size: 4}}
log: {{trackers: [wandb]}}
"""


@pytest.mark.parametrize("method", ["sfft", "Online-DPOO", "7"])
def test_the_other_faults_are_told_beside_a_wrong_method(
    method: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("memtrain.cli.plan.check_run.installed", lambda *names: frozenset())
    (folder / "my.yaml").write_text(WRONG_METHOD.format(method=method))
    assert main(["check", "my.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    faults = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    assert faults[0].startswith(f"method: {method if method.isdigit() else repr(method)}")
    assert faults[1:] == [
        "length.max_lenght: unknown key",
        "the length of the run is set twice",
        "there is no file 'gone.jsonl'",
        "there is no folder ./none",
        "wandb is asked for but not installed",
    ]


def test_a_wrong_method_with_the_section_of_one_leads_to_that_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "my.yaml").write_text(
        "method: dppo\nmodel: {path: builtin:tiny}\ndata: {train: a.jsonl}\ndpo: {beta: 3x}\n"
    )
    assert main(["check", "my.yaml"]) == 2
    reported = capsys.readouterr().err
    assert "  try: write method: dpo, whose section is at my.yaml:4:1\n" in reported
    assert "the section of another method" not in reported
    assert "error: dpo.beta: '3x' is text; it must be a number above 0\n" in reported
    assert reported.count("error: ") == 2


def test_no_rule_of_one_method_is_told_where_the_method_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "my.yaml").write_text(
        "model: {path: builtin:tiny}\ndata: {train: a.jsonl}\nrewards: {functions: exact_answer}\n"
        "generate: {num_generations: 2}\n"
    )
    assert main(["check", "my.yaml"]) == 2
    reported = capsys.readouterr().err
    assert reported.count("error: ") == 1
    assert reported.startswith(
        "error: method: missing\n   at: my.yaml:1:1\n  try: add `method: sft`, or another of dpo"
    )


def test_two_numbers_are_not_read_as_one(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "my.yaml", "train.batch_size=2,4"]) == 2
    assert "24" not in capsys.readouterr().err
    assert main(["check", "my.yaml", "train.batch_size=1,024"]) == 2
    assert "write batch_size: 1024" in capsys.readouterr().err


def test_a_rule_that_a_word_of_the_command_line_breaks_is_told_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    text = (folder / "my.yaml").read_text()
    (folder / "my.yaml").write_text(text + "train: {max_steps: 2}\n")
    number = len(text.splitlines()) + 1
    assert main(["check", "my.yaml", "train.epochs=1"]) == 2
    assert capsys.readouterr().err == (
        "error: the length of the run is set twice\n"
        "   at: from the command line: `train.epochs=1`\n"
        "  try: set train.epochs or train.max_steps, not both: add `train.max_steps=null`, which takes away "
        f"what my.yaml:{number}:9 sets\n"
    )
    with_both = ["train.epochs=1", "train.max_steps=null"]
    assert main(["check", "my.yaml", *with_both]) == 0
    capsys.readouterr()
    assert main(["check", "my.yaml", "train.max_steps=null", "train.epochs=1", "train.max_steps=3"]) == 2
    assert "  try: set train.epochs or train.max_steps, not both\n" in capsys.readouterr().err


def test_a_fault_of_many_rows_is_told_once_with_their_number(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    row = '{"prompt": "a", "completion": "b", "images": ["a.png"]}\n'
    (folder / "media.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + row * 200)
    assert main(["check", "my.yaml", "data.train=media.jsonl"]) == 4
    reported = capsys.readouterr().err
    assert reported.count("error: ") == 1
    assert reported.startswith(
        "error: the row has images (column 'images') (the same in 98 more of the first 100 rows)\n"
        "   at: media.jsonl:2\n"
    )


def test_rows_of_llamafactorys_kto_are_offered_with_their_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "kto.jsonl").write_text('{"instruction": "a", "output": "b", "kto_tag": true}\n' * 4)
    words = ["check", "smoke/kto", "data.train=kto.jsonl", "data.eval_fraction=0"]
    assert main(words) == 4
    offered = "data.columns: {prompt: instruction, completion: output, label: kto_tag}"
    assert f"  try: {offered}; and data.strings_are: turns where its strings are turns of a chat\n" in (
        capsys.readouterr().err
    )
    assert main([*words, offered.replace(": ", "=", 1)]) == 0


def test_two_columns_of_unknown_names_are_offered_as_a_line_to_paste(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "odd.jsonl").write_text('{"src": "a", "tgt": "b"}\n')
    assert main(["check", "my.yaml", "data.train=odd.jsonl"]) == 4
    offered = "{question: src, answer: tgt}"
    assert f"  try: map your columns, such as data.columns: {offered}\n" in capsys.readouterr().err
    assert main(["check", "my.yaml", "data.train=odd.jsonl", f"data.columns={offered}"]) == 0


def test_a_run_that_cannot_begin_tells_every_fault(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "my.yaml").write_text(
        "method: sft\nmodel: {path: ./none}\ndata: {train: gone.jsonl}\nlog: {trackers: [wandb]}\n"
    )
    assert main(["sft", "my.yaml", "log.trackers=[]"]) != 0
    assert capsys.readouterr().err == (
        "error: there is no folder ./none\n"
        "   at: my.yaml:2:9 (model.path)\n"
        "  try: give a hub id (owner/name) or a folder\n"
        "error: there is no file 'gone.jsonl'\n"
        "   at: my.yaml:3:8 (data.train[0])\n"
        "  try: did you mean 'b.jsonl'?\n"
    )


def test_columns_that_are_not_used_are_told_once(folder: Path, capsys: pytest.CaptureFixture[str]):
    rows = '{"prompt": "2 + 2", "completion": "4", "level": "easy"}\n' * 8
    (folder / "more.jsonl").write_text(rows)
    words = ["data.train=more.jsonl", "train.max_steps=1", "cluster.device=cpu", "memory.budget=auto"]
    assert main(["sft", "my.yaml", *words, "--run-dir", "run"]) == 0
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("column 'level' (all rows)") == 1
    assert "column 'level' (all rows)" in (folder / "run" / "report.html").read_text().replace("&#39;", "'")


def test_columns_that_no_text_holds_are_named_with_their_share(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [
        f'{{"instruction": "a", "input": "b", "output": "c", "level": "easy", "note": {note}}}'
        for note in ('"x"', "null", '"y"', '""')
    ]
    (folder / "alpaca.jsonl").write_text("\n".join(rows))
    assert main(["check", "my.yaml", "data.train=alpaca.jsonl"]) == 0
    assert (
        "alpaca.jsonl: format alpaca, the first 4 rows can be used; not in the rendered text of the rows: "
        "column 'level' (all rows), column 'note' (2 of 4 rows, 50.0%) data.train, loss 4 of"
    ) in " ".join(capsys.readouterr().out.split())


def test_a_run_whose_rows_all_fall_away_tells_the_line_of_max_length(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "long.jsonl").write_text('{"prompt": "' + "word " * 200 + '", "completion": "b"}\n')
    (folder / "my.yaml").write_text(
        "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: long.jsonl}\nlength: {max_length: 32}\n"
    )
    assert main(["sft", "my.yaml"]) == 4
    assert "   at: my.yaml:4:10 (length.max_length)\n" in capsys.readouterr().err


def test_a_source_that_is_a_path_alone_gets_a_second_key_from_the_command_line(
    capsys: pytest.CaptureFixture[str],
):
    words = [
        "data.train=a.jsonl",
        "data.train.limit=2",
        "data.eval=[a.jsonl, b.jsonl]",
        "data.eval.1.limit=1",
    ]
    assert main(["check", "my.yaml", *words]) == 0
    reported = capsys.readouterr().out
    assert "a.jsonl (limit: 2) " in reported
    assert "a.jsonl; b.jsonl (limit: 1) " in reported
    assert main(["check", "my.yaml", "data.train=a.jsonl", "data.train.limt=2"]) == 2
    assert "error: data.train.limt: unknown key\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("optim=adamw_bnb_8bit", "optim.kind: adamw_8bit"),
        ("model.adapter=lora", "model.adapter.kind: lora"),
    ],
)
def test_a_kind_in_the_place_of_its_section_leads_to_the_key(
    word: str, written: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["check", "my.yaml", word]) == 2
    assert f"  try: write {written}\n" in capsys.readouterr().err


def test_a_method_that_is_missing_is_that_of_the_command(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "my.yaml").write_text("model: {path: builtin:tiny}\ndata: {train: a.jsonl}\n")
    assert main(["dpo", "my.yaml"]) == 2
    assert "  try: add `method: dpo`, the method of the command\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("model.add_tokens=['<a>', '<a>']", "'<a>' is in the list twice"),
        ("model.add_tokens=['<eos>']", "'<eos>' is a token already"),
        ("eval.samples={prompts: []}", "eval.samples.prompts: an empty list was given"),
    ],
)
def test_a_list_is_refused_with_what_is_wrong_in_it(word: str, what: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", "my.yaml", word]) != 0
    assert f"error: {what}" in capsys.readouterr().err


def test_metrics_of_rows_without_prompts_are_refused_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "texts.jsonl").write_text('{"text": "2 + 2 is 4"}\n' * 8)
    (folder / "said.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}]}\n' * 8
    )
    (folder / "m.yaml").write_text(
        "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: texts.jsonl, eval_fraction: 0.5}\n"
        "eval: {metrics: {functions: exact_answer}}\n"
    )
    for rows, more in (("texts", ()), ("said", ("data.assistant_only_loss=false",))):
        assert main(["check", "m.yaml", f"data.train={rows}.jsonl", *more]) != 0
        reported = capsys.readouterr().err
        assert "error: no held-out row has a prompt" in reported
        assert "at: m.yaml:4:8 (eval.metrics)" in reported
    for words in (["data.train=a.jsonl"], ["data.train=said.jsonl"]):
        assert main(["check", "m.yaml", *words]) == 0
        assert "have a prompt to answer" in capsys.readouterr().out


def test_a_reward_that_needs_a_column_which_the_rows_lack_is_refused_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "rw.py").write_text("def f(completion, answer):\n    return 1.0\n")
    (folder / "p.jsonl").write_text('{"prompt": "a?", "gold": "b"}\n' * 3)
    (folder / "g.yaml").write_text(
        "method: grpo\nmodel: {path: builtin:tiny}\ndata: {train: p.jsonl}\nrewards: {functions: ./rw.py:f}\n"
    )
    assert main(["check", "g.yaml"]) == 2
    reported = capsys.readouterr().err
    assert "reward 'f' needs answer, which the rows do not have" in reported
    assert "g.yaml:4:" in reported
    (folder / "p.jsonl").write_text('{"prompt": "a?", "answer": "b"}\n' * 3)
    assert main(["check", "g.yaml"]) == 0


def test_an_environment_is_looked_at_before_the_run(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Its file, its class, and the columns that its `reset` takes, at the line or word that names it."""
    (folder / "env.py").write_text(
        "class Env:\n    def reset(self, gold): ...\n    def step(self, text): ...\n"
        "def f(completion, environment):\n    return 1.0\n"
    )
    (folder / "p.jsonl").write_text('{"prompt": "a?", "answer": "b"}\n' * 3)
    (folder / "g.yaml").write_text(
        "method: grpo\nmodel: {path: builtin:tiny}\ndata: {train: p.jsonl}\n"
        "rewards: {functions: ./env.py:f, environment: {path: ./env.py:Env}}\n"
    )
    assert main(["check", "g.yaml"]) == 2
    reported = capsys.readouterr().err
    assert "./env.py:Env.reset needs gold, which the rows do not have" in reported
    assert "at: g.yaml:4:" in reported
    assert main(["check", "g.yaml", "rewards.environment.path=./env.py:Gone"]) == 2
    reported = capsys.readouterr().err
    assert "./env.py has no class 'Gone'" in reported
    assert "at: from the command line: `rewards.environment.path=./env.py:Gone`" in reported
    (folder / "p.jsonl").write_text('{"prompt": "a?", "gold": "b"}\n' * 3)
    assert main(["check", "g.yaml"]) == 0


TURNS = [("user", "Hello?"), ("assistant", "Yes."), ("user", "Bye."), ("assistant", "Ciao.")]
TALK = [{"role": role, "content": content} for role, content in TURNS]


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_first_rows_are_rendered_before_the_run(folder: Path, capsys: pytest.CaptureFixture[str]):
    thinks = [
        TALK[0],
        TALK[1] | {"reasoning_content": "Hm."},
        TALK[2],
        TALK[3] | {"reasoning_content": "Hm."},
    ]
    rows = [{"messages": thinks}, {"messages": TALK}, {"messages": [TALK[0], TALK[1] | {"content": ""}]}]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["check", "my.yaml", "data.train=chat.jsonl", "model.chat_template=qwen3"]
    assert main(words) == 0
    said = told(capsys)
    assert "data.train, rendering trained: the assistant's turns (data.assistant_only_loss: false" in said
    assert "message field 'reasoning_content' of earlier messages (1 of 3 rows, 33.3%)" in said
    assert "with empty answers: 1 of 3 rows, 33.3% (the first: chat.jsonl:3)" in said
    assert main([*words, "data.assistant_only_loss=false"]) == 0
    assert "trained: all turns (data.assistant_only_loss: false)" in told(capsys)


def test_turns_that_cannot_be_found_are_refused_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "chat.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    (folder / "t.jinja").write_text("{% for m in messages %}{{ m.content[: 4 * loop.revindex] }}{% endfor %}")
    words = ["check", "my.yaml", "data.train=chat.jsonl", "model.chat_template=t.jinja"]
    assert main(words) == 4
    assert "train on all turns (data.assistant_only_loss: false)" in capsys.readouterr().err
    assert main([*words, "data.assistant_only_loss=false"]) == 0


def test_a_row_that_the_template_refuses_is_told_by_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"messages": TALK}, {"messages": [TALK[0], TALK[2], TALK[1]]}, {"messages": TALK[:1]}]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["check", "my.yaml", "data.train=chat.jsonl", "model.chat_template=gemma"]
    assert main(words) == 4
    err = capsys.readouterr().err
    assert "refuses the conversation: Conversation roles must alternate" in err
    assert "at: chat.jsonl:2" in err
    assert "no token of the row is the assistant's" in err
    assert "at: chat.jsonl:3" in err
    assert main([*words, "data.on_bad_row=skip"]) == 0


def test_check_refuses_a_max_length_that_keeps_nothing_as_a_run_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [json.dumps({"prompt": "word " * 20, "completion": f"{i}"}) for i in range(3)]
    (folder / "long.jsonl").write_text("\n".join(rows))
    words = ["my.yaml", "data.train=long.jsonl", "length.max_length=8"]
    said = []
    for command in ("check", "sft"):
        assert main([command, *words]) == 4
        said.append(capsys.readouterr().err.splitlines()[:2])
    assert said[0] == said[1]
    assert "none of 3 rows is left: no loss token is within 8 tokens" in said[0][0]
    assert main(["check", *words[:2], "length.max_length=8", "length.truncation=keep_end"]) == 0
    assert "3 of the first 3 rows keep a loss token; 3 have <eos>" in one_line(capsys)


def test_check_counts_the_rows_that_learn_to_end_a_turn(folder: Path, capsys: pytest.CaptureFixture[str]):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 30}]
    short = [turns[0], {"role": "assistant", "content": "Yes"}]
    rows = [json.dumps({"messages": one}) for one in (turns, short, short)]
    (folder / "chats.jsonl").write_text("\n".join(rows))
    words = ["my.yaml", "data.train=chats.jsonl", "model.chat_template=chatml", "length.max_length=24"]
    assert main(["check", *words]) == 0
    assert "3 of the first 3 rows keep a loss token; 2 have <|im_end|>, which ends a turn" in one_line(capsys)


@pytest.mark.parametrize("row", ['{"text": "a"}', '{"messages": [{"role": "user", "content": "a"}]}'])
@pytest.mark.parametrize("command", ["check", "sft"])
def test_a_model_folder_without_a_tokenizer_is_told_as_such(
    command: str, row: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    """It was one token in `check`, and the fault of row 1 or of the chat template in a run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=9, **shape)).save_pretrained(folder / "bare")
    (folder / "one.jsonl").write_text(row)
    assert main([command, "my.yaml", "data.train=one.jsonl", "model.path=./bare"]) != 0
    said = capsys.readouterr().err
    assert "'./bare' has no tokenizer: there is no vocabulary in its files" in said
    assert "chat template" not in said
    assert "one.jsonl" not in said


def test_a_missing_file_of_held_out_rows_is_among_the_faults(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["my.yaml", "data.eval=gone.jsonl", "data.train=lost.jsonl", "data.shufle=1"]
    for given in (words, words[:3], words[:2]):
        assert main(["check", *given]) != 0
        said = capsys.readouterr().err
        assert ("'gone.jsonl'" in said, "'lost.jsonl'" in said) == (True, len(given) > 2)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without line ends."""
    return " ".join(capsys.readouterr().out.split())
