"""Tokenizing: the tokenizer's own ids, spans that start where they should, pairs that share a prompt."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from memtrain.recipes.formats.fields import Names
from memtrain.recipes.formats.prompt import ASKED
from memtrain.trainers.data.tokenize import encode
from memtrain.trainers.data.tokenize.encode import Encoder, few_at_once
from memtrain.trainers.data.tokenize.render import Piece, Rendering
from memtrain.trainers.data.tokenize.tiny_tokenizer import FOLDER, training_texts
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.data.tokenize.workers import Batch, Job, Reading, Tokenizing, batches, tokenized

TINY = (FOLDER / "tokenizer.json").read_text()
PLAIN = Rendering(None, {}, "<eos>", completion_only=True, assistant_only=False)


def trained(kind: str) -> str:
    """A small tokenizer of another make: bytes with a beginning token, bytes after NFC, or characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "characters"))
    specials = ["<s>", "</s>", "<eos>"]
    if kind == "characters":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials + alphabet, show_progress=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if kind == "nfc":
            tokenizer.normalizer = normalizers.NFC()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(list(training_texts())[:200], trainer)
    if kind == "both ends":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return tokenizer.to_str()


OTHERS = {kind: trained(kind) for kind in ("both ends", "nfc", "characters")} | {"tiny": TINY}


def slow_cut(tokenizer: Tokenizer, prompt: str, text: str, specials: bool) -> int:
    """Tokens that lie wholly in the prompt, from the tokenizer's offsets one by one."""
    encoding = tokenizer.encode(text, add_special_tokens=specials)
    cut = 0
    for (start, end), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
        if special and start == end == 0:
            if cut:
                break
        elif end > len(prompt):
            break
        cut += 1
    return cut


TEXT = st.text(st.sampled_from("ab 16+=\n.é日é🙂-"), max_size=20)


@pytest.mark.parametrize("kind", OTHERS)
@settings(max_examples=50, deadline=None)
@given(prompt=TEXT, completion=TEXT, specials=st.booleans())
def test_the_cut_is_the_end_of_the_last_token_wholly_in_the_prompt(kind, prompt, completion, specials):
    encoder = Encoder(OTHERS[kind])
    text = prompt + completion + "."
    piece = Piece(text, len(prompt), ((len(prompt), len(text)),), adds_specials=specials)
    (encoded,) = encoder.encode([piece])
    plain = Tokenizer.from_str(OTHERS[kind])
    assert encoded.ids.tolist() == plain.encode(text, add_special_tokens=specials).ids
    assert encoded.cut == slow_cut(plain, prompt, text, specials)
    assert encoded.loss_spans == ((encoded.cut, len(encoded.ids)),)


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=6), st.data())
def test_marked_spans_are_the_tokens_that_touch_them(texts, data):
    """As transformers' own mask: from the token of the first character to the token of the last."""
    bounds = np.cumsum([0, *map(len, texts)])
    chosen = [i for i in range(len(texts)) if texts[i] and data.draw(st.booleans())]
    spans = tuple((int(bounds[i]), int(bounds[i + 1])) for i in chosen)
    (encoded,) = Encoder(TINY).encode([Piece("".join(texts), 0, spans, adds_specials=False)])
    encoding = Tokenizer.from_str(TINY).encode("".join(texts), add_special_tokens=False)
    wanted = np.zeros(len(encoded.ids), bool)
    for start, end in spans:
        for token, (begin, stop) in enumerate(encoding.offsets):
            wanted[token] |= begin < end and stop > start
    mask = np.zeros(len(encoded.ids), bool)
    for start, end in encoded.loss_spans:
        mask[start:end] = True
    assert mask.tolist() == wanted.tolist()


def job(form: str, kind: str | None = None, rendering: Rendering = PLAIN, tokenizer: str = TINY) -> Job:
    return Job(tokenizer, rendering, kind or form, (Reading(form, Names()),))


def rows_of(rows: list[dict], work: Job):
    done = Tokenizing(work)(Batch([0] * len(rows), list(enumerate(rows, start=1))))
    return done


PLAIN_ROW = st.fixed_dictionaries(
    {"prompt": TEXT, "completion": TEXT.map(lambda text: text + ".")},
    optional={"id": st.integers(0, 3) | st.none(), "tools": st.just([])},
)


@pytest.mark.parametrize("kind", OTHERS)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(PLAIN_ROW, min_size=1, max_size=6), is_text=st.booleans())
def test_rows_of_strings_become_by_batch_what_they_become_one_by_one(kind, rows, is_text):
    """Prompts may be empty, tokens merge over the boundary, and a normaliser shortens some texts."""
    form = "text" if is_text else "prompt_completion"
    given_rows = [{"text": row["prompt"] + row["completion"]} for row in rows] if is_text else rows
    work = Tokenizing(job(form, tokenizer=OTHERS[kind]))
    batch = Batch([0] * len(rows), list(enumerate(given_rows, start=1)))
    made = work.rendered(batch)
    assert (made.plain is not None) == (kind in ("nfc", "tiny"))
    work.columns = [None]
    by_batch, by_row = work.encoded(made), work(batch)
    assert (by_batch.bad, by_batch.num_read, by_batch.unrendered) == ([], len(rows), by_row.unrendered)
    for name in ("ids", "part_tokens", "span_counts", "spans", "origin", "labels"):
        ours, theirs = getattr(by_batch.rows, name), getattr(by_row.rows, name)
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert by_batch.rows.num_merged == by_row.rows.num_merged


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "a", "completion": 1},
        {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
        {"prompt": "", "completion": ""},
        {"prompt": "a", "completion": "\ud800"},
        {"prompt": "a", "completion": "b", "image": "x.png"},
        {"prompt": "a", "completion": "b", "tools": '[{"name": "f"}]'},
        {"prompt": "a", "completion": "b", "chat_template_kwargs": {"a": 1}},
    ],
)
def test_a_batch_with_another_row_is_read_one_by_one(other):
    rows = [{"prompt": "a", "completion": "b"}, other]
    made = Tokenizing(job("prompt_completion")).rendered(Batch([0, 0], list(enumerate(rows, start=1))))
    assert made.plain is None
    assert len(made.examples) + len(made.bad) == 2


def test_a_completion_is_trained_on_from_its_first_token_to_the_end_token():
    done = rows_of([{"prompt": "Ana has 3 pens.\n", "completion": "3 + 1 = 4"}], job("prompt_completion"))
    tokenizer = load_tokenizer("builtin:tiny")
    prompt, answer = tokenizer("Ana has 3 pens.\n")["input_ids"], tokenizer("3 + 1 = 4<eos>")["input_ids"]
    assert done.rows.ids.tolist() == prompt + answer
    assert done.rows.spans.tolist() == [[len(prompt), len(prompt) + len(answer)]]
    assert done.rows.part_tokens.tolist() == [len(prompt), len(answer)]
    assert answer[-1] == tokenizer.eos_token_id
    assert done.rows.num_merged == 0


def test_a_token_over_the_boundary_belongs_to_the_completion():
    """ "many" is one token: cut at "ma|ny", it is trained on, and the row is counted."""
    done = rows_of([{"prompt": "How ma", "completion": "ny"}], job("prompt_completion"))
    tokenizer = load_tokenizer("builtin:tiny")
    assert done.rows.ids.tolist() == tokenizer("How many<eos>")["input_ids"]
    assert done.rows.part_tokens.tolist() == [len(tokenizer("How")["input_ids"]), 2]
    assert done.rows.num_merged == 1


def test_a_pair_is_one_prompt_and_two_answers():
    row = {"prompt": "How", "chosen": " many pens", "rejected": " much", "margin": 0.5}
    done = rows_of([row], job("preference"))
    tokenizer = load_tokenizer("builtin:tiny")
    prompt, chosen = tokenizer("How")["input_ids"], tokenizer(" many pens<eos>")["input_ids"]
    rejected = tokenizer(" much<eos>")["input_ids"]
    assert done.rows.ids.tolist() == prompt + chosen + rejected
    assert done.rows.part_tokens.tolist() == [len(prompt), len(chosen), len(rejected)]
    first, second = len(prompt), len(prompt) + len(chosen)
    assert done.rows.spans.tolist() == [[first, second], [second, second + len(rejected)]]
    assert done.rows.labels.tolist() == [0.5]


@settings(max_examples=50, deadline=None)
@given(prompt=TEXT, chosen=TEXT, rejected=TEXT)
def test_prompt_and_answer_of_a_pair_are_the_tokens_of_both_texts(prompt, chosen, rejected):
    if chosen == rejected:
        return
    row = {"prompt": prompt, "chosen": chosen + ".", "rejected": rejected + "."}
    done = rows_of([row], job("preference"))
    if done.bad:
        assert done.bad[0][2].endswith("answer has no loss token")
        return
    first, second, _ = done.rows.part_tokens.tolist()
    ids = done.rows.ids.tolist()
    tokenizer = load_tokenizer("builtin:tiny")
    assert ids[: first + second] == tokenizer(prompt + chosen + ".<eos>")["input_ids"]
    assert ids[:first] + ids[first + second :] == tokenizer(prompt + rejected + ".<eos>")["input_ids"]


def test_a_pair_becomes_two_rows_where_verdicts_are_wanted():
    row = {"prompt": "How", "chosen": " many", "rejected": " much"}
    done = rows_of([row], job("preference", kind="unpaired"))
    assert done.rows.labels.tolist() == [1.0, 0.0]
    assert done.rows.origin.tolist() == [[0, 1], [0, 1]]


def test_labels_beside_ids_say_what_is_trained_on():
    done = rows_of([{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]}], job("ids"))
    assert done.rows.spans.tolist() == [[1, 2], [3, 4]]
    (bad,) = rows_of([{"input_ids": [5, 6], "labels": [5, -100]}], job("ids")).bad
    assert bad[2] == "the row has no loss token"


def test_prompts_keep_their_columns_and_learn_nothing():
    done = rows_of([{"prompt": "How many?", "answer": "#### 3"}], job("prompt"))
    (kept,) = map(json.loads, done.rows.columns)
    # The prompt as it was read too: reward models write it by their own template.
    assert kept == {"answer": "#### 3", ASKED: {"prompt": "How many?", "tools": []}}
    assert done.rows.spans.tolist() == []


def test_a_row_that_learns_nothing_is_bad():
    no_end = Rendering(None, {}, None, completion_only=True, assistant_only=False)
    (bad,) = rows_of(
        [{"prompt": "How many?", "completion": ""}], job("prompt_completion", rendering=no_end)
    ).bad
    assert bad[:3] == (0, 1, "the row has no loss token: its completion is empty")
    (bad,) = rows_of([{"text": "3"}], job("text", rendering=no_end)).bad
    assert bad[2] == "the row has 1 token: nothing to predict"
    talk = Rendering(load_tokenizer("builtin:tiny").chat_template, {}, None, False, assistant_only=True)
    (bad,) = rows_of([{"messages": [{"role": "user", "content": "hi"}]}], job("messages", rendering=talk)).bad
    assert bad[2] == "no token of the row is the assistant's: there is no loss token"


def test_only_what_the_assistant_says_is_trained_on():
    tokenizer = load_tokenizer("builtin:tiny")
    talk = Rendering(tokenizer.chat_template, {}, None, completion_only=False, assistant_only=True)
    row = {
        "messages": [
            {"role": r, "content": c} for r, c in (("user", "How many?"), ("assistant", "3 + 1 = 4"))
        ]
    }
    done = rows_of([row], job("messages", rendering=talk))
    (start, end) = done.rows.spans.tolist()[0]
    assert tokenizer.decode(done.rows.ids[start:end]) == "3 + 1 = 4<|im_end|>"
    theirs = tokenizer.apply_chat_template(
        row["messages"], return_assistant_tokens_mask=True, return_dict=True
    )
    assert done.rows.ids.tolist() == theirs["input_ids"]
    assert [int(start <= i < end) for i in range(len(done.rows.ids))] == theirs["assistant_masks"]


def test_a_bad_row_leaves_the_others_as_they_are():
    rows = [{"text": "a b"}, {"text": 3}, {"text": "c d"}]
    done = rows_of(rows, job("text"))
    assert [bad[1] for bad in done.bad] == [2]
    assert done.rows.origin.tolist() == [[0, 1], [0, 3]]


def test_batches_end_with_rows_or_with_characters():
    few = list(batches((0, (i, {"text": "x" * 2**20})) for i in range(5)))
    assert [len(batch.lines) for batch in few] == [2, 2, 1]
    many = list(batches((0, (i, {"text": "x"})) for i in range(2500)))
    assert [len(batch.lines) for batch in many] == [1000, 1000, 500]


@pytest.mark.slow
def test_two_processes_give_the_same_rows_as_one():
    rows = [(0, (i, {"text": f"{i} pens"})) for i in range(3000)]
    one = [batch.rows.ids.tolist() for batch in tokenized(rows, job("text"), 1)]
    two = [batch.rows.ids.tolist() for batch in tokenized(rows, job("text"), 2)]
    assert one == two


def test_a_row_never_ends_twice_and_a_prompt_never_ends():
    """A tokenizer that puts <s> before and </s> after every text, and rows that end in </s> already."""
    ends = Rendering(None, {}, "</s>", completion_only=True, assistant_only=False)
    given = Job(OTHERS["both ends"], ends, "prompt_completion", (Reading("prompt_completion", Names()),))
    done = rows_of([{"prompt": "How many?", "completion": " 3"}], given)
    tokenizer = Tokenizer.from_str(OTHERS["both ends"])
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    ids = done.rows.ids.tolist()
    assert (ids.count(begin), ids.count(end), ids[-1]) == (1, 1, end)
    assert done.rows.spans.tolist()[0][1] == len(ids), "the end is learnt"
    asks = Job(OTHERS["both ends"], PLAIN, "prompt", (Reading("prompt", Names()),))
    ids = rows_of([{"prompt": "How many?"}], asks).rows.ids.tolist()
    assert (ids.count(begin), ids.count(end)) == (1, 0)
    bare = Rendering(None, {}, None, completion_only=True, assistant_only=False)
    own = Job(OTHERS["both ends"], bare, "text", (Reading("text", Names()),))
    assert rows_of([{"text": "3 + 1"}], own).rows.ids.tolist()[-1] == end, "the tokenizer's own end stays"


def test_the_tokenizer_is_given_few_characters_at_once_whatever_the_rows(monkeypatch: pytest.MonkeyPatch):
    texts = ["a b", "", "c" * 30, "d e f", "g " * 9]
    assert [texts[some] for some in few_at_once(texts)] == [texts]
    monkeypatch.setattr(encode, "CHARS_AT_ONCE", 8)
    assert [texts[some] for some in few_at_once(texts)] == [["a b", ""], ["c" * 30], ["d e f"], ["g " * 9]]
    assert list(few_at_once([])) == []
    encoder = Encoder(load_tokenizer("builtin:tiny").backend_tokenizer.to_str())
    pieces = [Piece(text, 0, ((0, len(text)),), adds_specials=False) for text in texts]
    few = [one.ids.tolist() for one in encoder.encode(pieces)]
    monkeypatch.setattr(encode, "CHARS_AT_ONCE", 2**21)
    assert few == [one.ids.tolist() for one in encoder.encode(pieces)]
