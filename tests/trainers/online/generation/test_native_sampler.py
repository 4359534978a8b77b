"""The native sampler: the model's own greedy tokens, prompts read once, samples that batching cannot move."""

import pytest
import torch

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.online.generation import forward
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampling
from memtrain.trainers.online.generation.token_sampling import choose, penalised, truncated
from memtrain.trainers.online.generation.transformers_sampler import TransformersSampler

PROMPTS = [(5, 9, 2, 11), (3,), (7, 7, 1, 30, 8, 2, 90), (14, 6)]
STOPS = tuple(range(5, 128, 9))


def sharp(model: torch.nn.Module) -> torch.nn.Module:
    """The model with a head that is sure of itself: no ties."""
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model.eval()


def native(model: torch.nn.Module, **changes) -> NativeSampler:
    return NativeSampler(
        **({"model": model, "backend": AttentionBackend.TORCH_CPU, "max_rows": 64} | changes)
    )


def groups(count: int = 3) -> list[Group]:
    return [Group(prompt, count, seed=100 + i) for i, prompt in enumerate(PROMPTS)]


def greedy(model: torch.nn.Module, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=sampling.max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(sampling.stop_ids) or None,
        repetition_penalty=sampling.repetition_penalty,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("stops", [(), STOPS], ids=["to the end", "stopping"])
@pytest.mark.parametrize("max_rows", [64, 4, 2])
def test_greedy_tokens_are_those_of_generate(tiny_model, stops, max_rows):
    """Rows 4 of 12 refill as rows finish; rows 2 of a group of 3 split the group."""
    model = sharp(tiny_model())
    sampling = Sampling(max_tokens=20, temperature=0, stop_ids=stops)
    made = native(model, max_rows=max_rows).generate(groups(), sampling)
    for group, samples in zip(groups(), made, strict=True):
        expected = greedy(model, group.prompt_ids, sampling)
        assert [list(sample.token_ids) for sample in samples] == [expected] * 3
        assert {sample.finish for sample in samples} == {"stop" if expected[-1] in stops else "length"}


def test_prompts_are_read_in_slices(tiny_model):
    """Of 14 prompt tokens no layer sees more than 5 at once; slices end inside two of the prompts."""
    model = sharp(tiny_model())
    sampling = Sampling(max_tokens=12, temperature=0.7, stop_ids=STOPS)
    expected = native(model).generate(groups(), sampling)
    stream_layers(model, 5)
    seen = []
    handles = [
        layer.mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
        for layer in model.model.layers
    ]
    found = native(model, max_rows=64).generate(groups(), sampling)
    for handle in handles:
        handle.remove()
    assert sum(map(len, PROMPTS)) == 14
    # Three slices of each layer; whatever follows is a token a row.
    num_layers = len(model.model.layers)
    assert seen[: 3 * num_layers] == [5, 5, 4] * num_layers
    for some, others in zip(found, expected, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, rel=1e-4, abs=1e-5)


def test_repetition_penalty_is_that_of_generate(tiny_llama):
    model = sharp(tiny_llama())
    sampling = Sampling(max_tokens=20, temperature=0, repetition_penalty=1.7)
    made = native(model, max_rows=5).generate(groups(2), sampling)
    for group, samples in zip(groups(2), made, strict=True):
        assert list(samples[1].token_ids) == greedy(model, group.prompt_ids, sampling)


def test_recorded_log_probs_are_the_models_at_this_temperature(tiny_model):
    model = tiny_model().eval()
    sampling = Sampling(max_tokens=12, temperature=0.7, top_p=0.9, stop_ids=STOPS)
    made = native(model, max_rows=5).generate(groups(), sampling)
    for group, samples in zip(groups(), made, strict=True):
        for sample in samples:
            ids = torch.tensor([[*group.prompt_ids, *sample.token_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1]
            expected = (logits / 0.7).log_softmax(-1).gather(1, ids[0, len(group.prompt_ids) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_samples_do_not_depend_on_rows_order_or_back_end(tiny_qwen3):
    model = sharp(tiny_qwen3())
    sampling = Sampling(max_tokens=15, temperature=1.0, top_k=50, top_p=0.95, min_p=0.01, stop_ids=STOPS)
    whole = native(model).generate(groups(), sampling)

    def ids(made: list[list[Sample]]) -> list[list[tuple[int, ...]]]:
        return [[sample.token_ids for sample in samples] for samples in made]

    assert len({tokens for samples in ids(whole) for tokens in samples}) > 6
    assert ids(native(model, max_rows=2).generate(groups(), sampling)) == ids(whole)
    assert (
        ids(native(model, max_rows=5, read_tokens=1).generate(groups()[::-1], sampling)) == ids(whole)[::-1]
    )
    assert ids(native(model).generate(groups(5), sampling))[1][:3] == ids(whole)[1]
    for rows in (64, 5):
        fallback = TransformersSampler(model, max_rows=rows, pad_id=0)
        assert ids(fallback.generate(groups(), sampling)) == ids(whole)
    assert ids(native(model).generate([Group(PROMPTS[0], 3, seed=1)], sampling)) != ids(whole)[:1]


def test_the_fallback_records_the_same_log_probs_and_ends(tiny_llama):
    model = sharp(tiny_llama())
    sampling = Sampling(max_tokens=15, temperature=0.9, repetition_penalty=1.2, stop_ids=STOPS)
    ours = native(model).generate(groups(), sampling)
    theirs = TransformersSampler(model, max_rows=7, pad_id=0).generate(groups(), sampling)
    for own, other in zip(sum(ours, []), sum(theirs, []), strict=True):
        assert own.token_ids == other.token_ids
        assert own.finish == other.finish
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_each_prompt_is_read_once_and_its_keys_are_shared(tiny_llama, monkeypatch):
    """4 prompts of 14 tokens in all, 8 completions each: 14 prompt tokens are forwarded, not 112."""
    model = tiny_llama().eval()
    seen = []
    read = forward.read_prompts

    def spy(model, prompts, keys, first, backend):
        seen.append((sum(map(len, prompts)), keys))
        return read(model, prompts, keys, first, backend)

    monkeypatch.setattr("memtrain.trainers.online.generation.native_sampler.read_prompts", spy)
    native(model).generate(groups(8), Sampling(max_tokens=6))
    assert sum(tokens for tokens, _ in seen) == 14
    # 2 layers, keys and values, 2 heads of width 16, fp32: 4 prompts of up to 7 tokens, 32 rows of 6.
    assert seen[0][1].num_bytes == 2 * 2 * 2 * 16 * 4 * (4 * 7 + 32 * 6)


def test_the_fallback_feeds_one_token_a_step_and_only_what_is_asked_for(tiny_llama):
    """Defect C8 of TRL 1.16's Online DPO: without a cache every token forwards the whole prefix again."""
    model = sharp(tiny_llama())
    model.generation_config.repetition_penalty = 3.0
    model.config.use_cache = False
    widths = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    made = TransformersSampler(model, 64, 0).generate(groups(1), Sampling(max_tokens=9))
    assert widths[1:] == [1] * 8
    ours = native(model).generate(groups(1), Sampling(max_tokens=9))
    assert [s[0].token_ids for s in made] == [s[0].token_ids for s in ours]


def test_stop_strings_end_a_completion_with_the_token_that_completes_them(tiny_llama):
    model = sharp(tiny_llama())

    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    plain = Sampling(max_tokens=20)
    stopped = Sampling(max_tokens=20, stop_strings=("x", "ab"))
    for sampler in (native(model, decode=decode), TransformersSampler(model, 64, 0, decode)):
        whole = sum(sampler.generate(groups(8), plain), [])
        made = sum(sampler.generate(groups(8), stopped), [])
        assert any(sample.finish == "string" for sample in made)
        for sample, other in zip(made, whole, strict=True):
            text = decode(list(sample.token_ids))
            assert sample.token_ids == other.token_ids[: len(sample.token_ids)]
            found = "x" in text or "ab" in text
            assert (sample.finish == "string") == found
            assert "x" not in text[:-1]
            assert "ab" not in text[:-1]


def test_a_finished_group_is_handed_over_at_once(tiny_llama):
    reported = {}
    made = native(tiny_llama(), max_rows=4).generate(
        groups(), Sampling(max_tokens=5), lambda number, samples: reported.update({number: samples})
    )
    assert [reported[i] for i in range(4)] == made


def test_the_model_is_left_as_it_was(tiny_llama):
    model = tiny_llama().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    native(model).generate(groups(), Sampling(max_tokens=3))
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"


def test_the_choice_follows_the_cumulative_distribution():
    """Probabilities 0.5, 0.25, 0.25: the numbers 0.4, 0.6, 0.8 fall on the three tokens."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(3, 3)
    ids, logp = choose(logits, torch.tensor([0.4, 0.6, 0.8], dtype=torch.float64), Sampling(max_tokens=1))
    assert ids.tolist() == [0, 1, 2]
    assert logp.exp().tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_a_token_without_probability_is_never_chosen():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, 3)
    uniform = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert choose(logits, uniform, Sampling(max_tokens=1))[0].tolist() == [1, 1, 1]


def test_the_distribution_of_many_draws_is_the_models():
    """20,000 draws: deviation of a share p is sqrt(p (1 - p) / n) < 0.0036; five of them."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, _ = choose(probs.log().expand(20_000, 4), uniform, Sampling(max_tokens=1))
    shares = torch.bincount(ids, minlength=4) / 20_000
    assert (shares - probs).abs().max() < 0.018


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"top_k": 2}, [1, 1, 0, 0]),
        ({"top_p": 0.8}, [1, 1, 0, 0]),
        ({"top_p": 0.81}, [1, 1, 1, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"min_p": 0.3}, [1, 1, 1, 0]),
        ({"top_k": 3, "min_p": 0.4}, [1, 1, 0, 0]),
    ],
)
def test_unlikely_tokens_are_cut(setting, kept):
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    made = truncated(probs, Sampling(max_tokens=1, **setting))
    assert (made > 0).long().tolist() == [kept]
    assert Sampling(max_tokens=1, **setting).is_truncated


def test_the_penalty_lowers_what_was_seen():
    made = penalised(torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[True, True, False]]), 2.0)
    assert made.tolist() == [[1.0, -4.0, 2.0]]
