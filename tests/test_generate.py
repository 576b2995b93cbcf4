"""Decoding with the draft: the same tokens as generate() when greedy, the same distribution when sampled."""

import string

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy import ALL_SHAPES, toy_draft, toy_target, toy_tokenizer
from transformers import (
    AutoModel,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextStreamer,
    WatermarkingConfig,
)

from eagle3_llama.custom_generate.generate import generate
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3

CHAIN, TREE = {"num_draft_tokens": 3}, {"tree": {"top_k": 3, "depth": 3, "total_tokens": 8}}
BUSHY = {"tree": {"top_k": 4, "depth": 2, "total_tokens": 99}}


class Informed(LlamaForCausalLMEagle3):
    """A draft that leans towards given texts: `future` [rows,positions] ids, `bonus` added to their logits."""

    def forward(self, input_ids, hidden_states, *args, position_ids, predict_at=None, **kwargs):
        output = super().forward(
            input_ids, hidden_states, *args, position_ids=position_ids, predict_at=predict_at, **kwargs
        )
        rows = torch.arange(len(input_ids))[:, None]
        positions = position_ids.expand(len(input_ids), -1)
        if predict_at is not None:
            positions = positions[rows, predict_at[:, None]]
        positions = (positions + 2).clamp(0, self.future.shape[1] - 1)  # slot p predicts token p + 2
        output.logits.scatter_add_(2, self.future[rows, positions, None], self.bonus[rows, positions, None])
        return output


def informed(target, sequences, mask, known=1.0, bonus=50.0, **overrides):
    """A draft that knows a share of the greedy continuations, left-padded prompts included."""
    draft = toy_draft(target, draft_vocab_size=target.config.vocab_size, **overrides)
    draft.__class__ = Informed
    draft.future = torch.zeros(len(sequences), sequences.shape[1] + 8, dtype=torch.long)
    for row, (ids, visible) in enumerate(zip(sequences, mask, strict=True)):
        text = ids[int((visible == 0).sum()) :]
        draft.future[row, : len(text)] = text
    chance = torch.rand(draft.future.shape, generator=torch.Generator().manual_seed(5))
    draft.bonus = (chance < known) * bonus
    return draft


def prompts(batch, length=10, side=None, seed=0, vocab=64):
    """Ids and mask [batch,length]; padded by up to length - 2 on that side."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, vocab, (batch, length), generator=random)
    holes = torch.randint(0, length - 1, (batch,), generator=random) if side else torch.zeros(batch)
    slots = torch.arange(length)
    mask = slots >= holes[:, None] if side != "right" else slots < length - holes[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def assert_same(target, draft, inputs, proposal, **options):
    """Returns the output of decoding with the draft, after comparing it with generate()."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 16} | options
    expected = target.generate(**inputs, **options)
    output = generate(target, **inputs, assistant_model=draft, return_dict_in_generate=True, **(options | proposal))
    assert output.sequences.tolist() == expected.tolist()
    return output


def answer(target, inputs, **options):
    """generate() without an end: the tokens a row would say."""
    return target.generate(
        **inputs, **({"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 16} | options)
    )


def letters() -> PreTrainedTokenizerFast:
    """A letter or digit an id, 64 in all; stop strings need a tokenizer that can spell."""
    vocabulary = ["<pad>", "<unk>", *string.ascii_lowercase, *string.ascii_uppercase, *string.digits]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


# ---- greedy: the tokens of generate() ----


@pytest.mark.parametrize("proposal", [{}, {"num_draft_tokens": 1}, BUSHY])
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_an_untrained_draft_changes_nothing(layers, fusion, proposal):
    target = toy_target()
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    output = assert_same(target, draft, prompts(2, side="left"), proposal)
    assert 1 <= output.acceptance["tau"] < 1.6


@pytest.mark.parametrize("proposal", [CHAIN, TREE])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_rows_that_accept_different_numbers_of_tokens(batch, side, proposal):
    target, inputs = toy_target(), prompts(batch, side=side)
    draft = informed(target, answer(target, inputs), inputs["attention_mask"], known=0.6)
    output = assert_same(target, draft, inputs, proposal)
    assert side == "right" or output.acceptance["tau"] > 1.3
    assert_same(target, draft, inputs, proposal, eos_token_id=list(range(6, 16)))


@pytest.mark.parametrize("proposal", [CHAIN, TREE])
def test_eager_attention_reads_the_same_masks(proposal):
    target, inputs = toy_target(), prompts(4, side="left")
    target.set_attn_implementation("eager")
    draft = informed(target, answer(target, inputs), inputs["attention_mask"], known=0.6)
    draft.set_attn_implementation("eager")
    assert assert_same(target, draft, inputs, proposal).acceptance["tau"] > 1.3


@pytest.mark.parametrize("options", [{}, {"fc_norm": True}, {"norm_output": True}])
def test_the_variants_of_the_draft(options):
    target = toy_target()
    assert_same(target, toy_draft(target, **options), prompts(2), CHAIN)


@pytest.mark.parametrize("proposal", [CHAIN, {"num_draft_tokens": 5}, TREE])
def test_no_token_follows_the_end_and_none_is_too_many(proposal):
    target, inputs = toy_target(), prompts(1)
    full = answer(target, inputs, max_new_tokens=24)
    draft = informed(target, full, inputs["attention_mask"])
    for end in range(10, 22):
        output = assert_same(target, draft, inputs, proposal, eos_token_id=[63, full[0, end].item()])
        assert output.sequences.shape[1] <= end + 1
    for count in range(1, 14):
        output = assert_same(target, draft, inputs, proposal, max_new_tokens=count)
        assert output.sequences.shape[1] == 10 + count
        assert_same(target, draft, inputs, proposal, max_new_tokens=None, max_length=10 + count)


@pytest.mark.parametrize("proposal", [CHAIN, TREE])
@pytest.mark.parametrize("eos", [None, [6, 30]])
def test_stop_strings(proposal, eos):
    target, inputs, tokenizer = toy_target(), prompts(3, side="left"), letters()
    full = answer(target, inputs)
    draft = informed(target, full, inputs["attention_mask"], known=0.7)
    for end in range(10, 24, 3):  # two letters of the first row's answer, and one of the second's
        words = [tokenizer.decode(full[0, end : end + 2]), tokenizer.decode(full[1, (end + 6) % 16 + 10])]
        assert len(words[0]) == 2
        assert_same(target, draft, inputs, proposal, stop_strings=words, tokenizer=tokenizer, eos_token_id=eos)


class EndsOnEven(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 2 == 0) & (input_ids[:, -2] % 2 == 0)


class Odd(LogitsProcessor):
    """Favours ids that differ from the newest in their parity: what it does depends on the prefix."""

    def __call__(self, input_ids, scores):
        ids = torch.arange(scores.shape[-1])
        return scores + 2.0 * ((ids + input_ids[:, -1:]) % 2)


PROCESSORS = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.3,
    "min_new_tokens": 7,
    "min_length": 15,
    "forced_eos_token_id": 9,
    "exponential_decay_length_penalty": (3, 1.3),
    "suppress_tokens": [7, 11, 20, 33],
    "begin_suppress_tokens": [7, 8, 40, 41, 42],
    "bad_words_ids": [[12], [20, 21], [33, 34, 35]],
    "sequence_bias": {(17,): 4.0, (17, 18): 9.0},
    "watermarking_config": WatermarkingConfig(bias=3.0),
    "renormalize_logits": True,
    "logits_processor": [Odd()],
    "stopping_criteria": [EndsOnEven()],
}


@pytest.mark.parametrize(
    ("name", "proposal"),
    [(name, CHAIN) for name in PROCESSORS] + [("no_repeat_ngram_size", TREE), ("logits_processor", TREE)],
)
def test_processors_read_the_right_prefix_at_every_position(name, proposal):
    target, inputs = toy_target(), prompts(3, side="left")
    options = {name: PROCESSORS[name], "eos_token_id": [9, 15, 27, 44]}
    plain = answer(target, inputs, **options)
    draft = informed(target, plain, inputs["attention_mask"], known=0.8)
    assert_same(target, draft, inputs, proposal, **options)


def test_a_constraint_is_asked_about_confirmed_prefixes_only():
    target, inputs, asked = toy_target(), prompts(1), []

    def allowed(row, ids):
        asked.append(ids[10:].tolist())
        return [6 + (len(ids) * 7 + ids[-1].item()) % 50, 8, 9]

    plain = answer(target, inputs, prefix_allowed_tokens_fn=allowed)
    draft = informed(target, plain, inputs["attention_mask"], known=0.7)
    asked.clear()
    assert_same(target, draft, inputs, CHAIN, prefix_allowed_tokens_fn=allowed)
    assert all(ids == plain[0, 10 : 10 + len(ids)].tolist() for ids in asked)


def test_buffers_grow_beyond_their_first_size():
    target, inputs = toy_target(), prompts(2, side="left")
    draft = informed(target, answer(target, inputs, max_new_tokens=270), inputs["attention_mask"], known=0.97)
    assert_same(target, draft, inputs, {"num_draft_tokens": 7}, max_new_tokens=270)


def test_inputs_as_generate_takes_them():
    target, draft = toy_target(), toy_draft(toy_target())
    ids = prompts(2, side="left")["input_ids"]  # the mask is told from the padding
    options = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": 5}
    expected = target.generate(ids, **options)
    assert generate(target, ids, assistant_model=draft, **options).tolist() == expected.tolist()
    config = GenerationConfig(**options)
    expected = target.generate(ids, generation_config=config)
    assert generate(target, ids, assistant_model=draft, generation_config=config).tolist() == expected.tolist()
    target.generation_config.max_new_tokens = 3
    expected = target.generate(ids[:1])
    assert generate(target, ids[:1], assistant_model=draft).tolist() == expected.tolist()


def test_in_bfloat16_only_near_ties_differ():
    target = toy_target().bfloat16()
    inputs = prompts(32, side="left")
    plain = answer(target, inputs, max_new_tokens=40)
    draft = informed(target, plain, inputs["attention_mask"], known=0.8).bfloat16()
    draft.bonus = draft.bonus.bfloat16()
    ours = generate(target, **inputs, assistant_model=draft, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    for row in (ours != plain).any(-1).nonzero()[:, 0].tolist():
        first = int((ours[row] != plain[row]).nonzero()[0])
        start = int((inputs["attention_mask"][row] == 0).sum())
        with torch.no_grad():
            logits = target(plain[row : row + 1, start:first]).logits[0, -1].float()
        two = logits.topk(2).values
        assert {ours[row, first].item(), plain[row, first].item()} <= set(logits.topk(3).indices.tolist())
        assert two[0] - two[1] <= 2**-5 * two[0].abs()  # a few steps of bfloat16


MODELS = {
    (layers, fusion, seed): None for layers, fusion in ALL_SHAPES for seed in (0, 1)
}  # built at first use, shared by the examples


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_speculative_is_plain(data):
    draw = data.draw
    key = draw(st.sampled_from(list(MODELS)))
    layers, fusion, seed = key
    if MODELS[key] is None:
        target = toy_target(seed)
        MODELS[key] = target, toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    target, draft = MODELS[key]
    inputs = prompts(
        draw(st.integers(1, 5)),
        draw(st.integers(2, 14)),
        draw(st.sampled_from([None, "left", "right"])),
        draw(st.integers(0, 99)),
    )
    size = st.integers(1, 4)
    chain = st.fixed_dictionaries({"num_draft_tokens": size})
    tree = st.fixed_dictionaries({"tree": st.fixed_dictionaries({"top_k": size, "depth": size, "total_tokens": size})})
    names = ["min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"]
    options = {name: PROCESSORS[name] for name in draw(st.sets(st.sampled_from(names), max_size=2))}
    options["max_new_tokens"] = draw(st.integers(1, 14))
    options["eos_token_id"] = draw(st.none() | st.lists(st.integers(0, 63), min_size=1, max_size=12))
    if draw(st.booleans()):
        options |= {"stop_strings": draw(st.lists(st.sampled_from(["q", "Zx", "T7a", "9"]), min_size=1, max_size=2))}
        options |= {"tokenizer": letters()}
    if draw(st.booleans()):
        draft = informed(target, answer(target, inputs, **options), inputs["attention_mask"], known=0.7)
    assert_same(target, draft, inputs, draw(chain | tree), **options)


# ---- the record and the stream ----


@pytest.mark.parametrize("proposal", [{"num_draft_tokens": 1}, {"num_draft_tokens": 4}, TREE])
def test_a_draft_that_knows_the_future_reaches_k_plus_one(proposal):
    target, inputs = toy_target(), prompts(2)
    depth = proposal.get("num_draft_tokens", 3)
    full = answer(target, inputs, max_new_tokens=1 + 5 * (depth + 1))
    draft = informed(target, full, inputs["attention_mask"])
    record = assert_same(target, draft, inputs, proposal, max_new_tokens=1 + 5 * (depth + 1)).acceptance
    assert record["tau"] == depth + 1 and record["steps"] == 5
    assert record["accepted"] == [[depth] * 5] * 2
    assert record["acceptance_per_position"] == [1.0] * depth


def test_the_record_adds_up():
    target, inputs = toy_target(), prompts(4, side="left")
    draft = informed(target, answer(target, inputs), inputs["attention_mask"], known=0.6)
    output = assert_same(target, draft, inputs, CHAIN, eos_token_id=list(range(6, 12)))
    record, new = output.acceptance, (output.sequences[:, 10:] != 0).sum(-1)
    passes = [len(row) for row in record["accepted"]]
    assert record["steps"] == max(passes)
    assert record["tau"] == pytest.approx((new - 1).sum().item() / sum(passes))
    flat = [number for row in record["accepted"] for number in row]
    assert record["acceptance_per_position"][0] == pytest.approx(sum(n > 0 for n in flat) / len(flat))
    first = output.sequences[:, 10].tolist()  # ended at once: no step was needed
    record = assert_same(target, draft, inputs, CHAIN, eos_token_id=first).acceptance
    assert record["steps"] == 0 and record["accepted"] == [[]] * 4 and record["tau"] == 0


class Pieces:
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, ids):
        self.pieces.append(ids.flatten().tolist())

    def end(self):
        self.ended = True


def test_text_is_streamed_as_it_is_accepted(capsys):
    target, inputs, streamer = toy_target(), prompts(1), Pieces()
    full = answer(target, inputs)
    draft = informed(target, full, inputs["attention_mask"])
    options = {"assistant_model": draft, "max_new_tokens": 13, "eos_token_id": None, "num_draft_tokens": 3}
    output = generate(target, **inputs, streamer=streamer, **options)
    assert streamer.ended and [len(piece) for piece in streamer.pieces] == [10, 1, 4, 4, 4]
    assert sum(streamer.pieces, []) == output[0].tolist()
    generate(target, **inputs, streamer=TextStreamer(toy_tokenizer(), skip_prompt=True), **options)
    ours = capsys.readouterr().out
    plain = {"max_new_tokens": 13, "eos_token_id": None}
    target.generate(**inputs, streamer=TextStreamer(toy_tokenizer(), skip_prompt=True), **plain)
    assert ours == capsys.readouterr().out != ""


# ---- what is refused ----


class Counting(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


REFUSED = {
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "prompt_lookup_num_tokens": 3,
    "num_return_sequences": 2,
    "guidance_scale": 2.0,
    "token_healing": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache": DynamicCache(),
    "prefill_chunk_size": 4,
    "num_assistant_tokens": 5,
    "assistant_tokenizer": toy_tokenizer(),
    "negative_prompt_ids": torch.ones(1, 3, dtype=torch.long),
    "synced_gpus": True,
    "inputs_embeds": torch.zeros(1, 4, 32),
    "no_such_option": 1,
    "num_draft_tokens": 0,
    "draft_temperature": 0.0,
    "tree": {"top_k": 2},
    "stop_strings": ["a1"],
    "assistant_model": None,
    "logits_processor": [Counting()],
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_option_is_refused_by_name(name):
    target = toy_target()
    options = {"assistant_model": toy_draft(target), name: REFUSED[name]}
    target.register_forward_pre_hook(lambda *args: pytest.fail("a model ran"))
    with pytest.raises(ValueError, match=name):
        generate(target, prompts(1)["input_ids"], max_new_tokens=4, **options)


def test_other_refusals():
    target = toy_target()
    draft, inputs = toy_draft(target), prompts(2)
    with pytest.raises(ValueError, match="streamer"):
        generate(target, **inputs, assistant_model=draft, streamer=Pieces())
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn"):
        generate(target, **inputs, assistant_model=draft, prefix_allowed_tokens_fn=lambda row, ids: [1])
    with pytest.raises(ValueError, match="num_draft_tokens.*tree"):
        generate(target, **inputs, assistant_model=draft, **CHAIN, **TREE)
    with pytest.raises(ValueError, match="top_k is 99.*40"):
        generate(target, **inputs, assistant_model=draft, tree={"top_k": 99, "depth": 1, "total_tokens": 4})
    with pytest.raises(ValueError, match="LlamaForCausalLM.*EAGLE-3"):
        generate(target, **inputs, assistant_model=target)
    with pytest.raises(ValueError, match="vocab_size 64.*70"):
        generate(toy_target(vocab_size=70), **inputs, assistant_model=draft)
    with pytest.raises(ValueError, match="hidden_size 32.*64"):
        generate(toy_target(hidden_size=64), **inputs, assistant_model=draft)


# ---- sampling: the distribution of generate() ----

LENGTH, VOCAB = 4, 5


@pytest.fixture(scope="module")
def sampled_models():
    target = toy_target(vocab_size=VOCAB, initializer_range=0.3)
    # Flat enough to be accepted about half of the time, and blind to one token.
    return target, toy_draft(target, draft_vocab_size=4, initializer_range=0.08)


def exact_distribution(target, prompt, **options):
    """Probability of each of the VOCAB ** LENGTH continuations, by enumeration."""
    config, _ = target._prepare_generation_config(None, do_sample=True, **options)
    config._eos_token_tensor = None
    processors = target._get_logits_processor(config, input_ids_seq_length=prompt.shape[1], model_kwargs={})
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    ids = torch.cat((prompt.expand(len(texts), -1), texts), 1)
    log_p = torch.zeros(len(texts))
    for end in range(prompt.shape[1], ids.shape[1]):
        with torch.no_grad():
            scores = processors(ids[:, :end], target(ids[:, :end]).logits[:, -1])
        log_p += scores.log_softmax(-1).gather(1, ids[:, end, None])[:, 0]
    return log_p.exp()


def chi_square(sequences, expected):
    """Standardised chi-square of the continuations' counts; cells below five are put together."""
    texts = sequences[:, -LENGTH:]
    index = (texts * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    counts, expected = torch.bincount(index, minlength=len(expected)).float(), expected * len(texts)
    assert counts[expected < 1e-6].sum() == 0
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None] + 1e-9))
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / (2 * freedom) ** 0.5


def deviation(models, proposal, options, thousands):
    """chi_square of that many thousand texts."""
    target, draft = models
    prompt, generator = torch.tensor([[1, 2, 3]]), torch.Generator().manual_seed(11)
    inputs = {"input_ids": prompt.expand(1000, -1), "attention_mask": torch.ones(1000, 3, dtype=torch.long)}
    fixed = {"max_new_tokens": LENGTH, "eos_token_id": None, "return_dict_in_generate": True}
    texts = []
    for _ in range(thousands):
        output = generate(
            target,
            **inputs,
            assistant_model=draft,
            do_sample=True,
            generator=generator,
            **fixed,
            **options,
            **proposal,
        )
        assert output.acceptance["tau"] > 1.02
        texts.append(output.sequences)
    options = {name: value for name, value in options.items() if name != "draft_temperature"}
    return abs(chi_square(torch.cat(texts), exact_distribution(target, prompt, **options)))


SPARSE = {"tree": {"top_k": 3, "depth": 2, "total_tokens": 4}}


@pytest.mark.parametrize("thousands", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 0},
        {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "draft_temperature": 0.5},
        {"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.5},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("proposal", [{"num_draft_tokens": 1}, CHAIN, SPARSE, TREE, BUSHY], ids=str)
def test_sampled_texts_have_the_targets_distribution(sampled_models, proposal, options, thousands):
    assert deviation(sampled_models, proposal, options, thousands) < 3.5


def test_what_a_tree_keeps_does_not_bend_the_distribution(sampled_models):
    # Candidates that are chosen by their own probability deviate by 5 and more here.
    assert deviation(sampled_models, SPARSE, {"top_k": 0, "draft_temperature": 0.4}, 5) < 3.5


def test_sampling_is_reproducible_by_seed(sampled_models):
    target, draft = sampled_models
    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    options = {"assistant_model": draft, "do_sample": True, "max_new_tokens": 20, "eos_token_id": None, **TREE}
    for seeded in (lambda seed: {"generator": torch.Generator().manual_seed(seed)}, torch.manual_seed):
        texts = []
        for seed in (1, 1, 2):
            extra = seeded(seed)
            extra = extra if isinstance(extra, dict) else {}
            texts.append(generate(target, **inputs, num_return_sequences=3, pad_token_id=0, **options, **extra))
        assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
        assert texts[0].shape == (3, 23)


# ---- as a custom_generate ----


def test_a_saved_draft_decodes(tmp_path):
    target, inputs = toy_target(), prompts(2, side="left")
    toy_draft(target).save_pretrained(tmp_path / "draft")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 5}
    expected = target.generate(**inputs, **options)
    remote = {"custom_generate": str(tmp_path / "draft"), "trust_remote_code": True}
    draft = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=True)
    for assistant in (draft, str(tmp_path / "draft")):
        for proposal in ({}, CHAIN, TREE):
            ours = target.generate(**inputs, **options, **remote, assistant_model=assistant, **proposal)
            assert ours.tolist() == expected.tolist()
    options |= {"stop_strings": ["b", "Q", "7", "x"], "tokenizer": letters()}
    expected = target.generate(**inputs, **options)
    assert target.generate(**inputs, **options, **remote, assistant_model=draft).tolist() == expected.tolist()
    draft.save_pretrained(tmp_path / "again")  # the code of this one lies in a cache, where nothing is beside it
    assert (tmp_path / "again" / "modeling_eagle3_llama.py").exists()


STRANGER = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
repo, target, inputs, output = sys.argv[1:]
inputs = torch.load(inputs)
target = AutoModelForCausalLM.from_pretrained(target)
draft = AutoModel.from_pretrained(repo, trust_remote_code=True)
options = dict(trust_remote_code=True, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
one = target.generate(**inputs, custom_generate=repo, assistant_model=draft, **options)
two = target.generate(**inputs, custom_generate=repo, assistant_model=repo, **options)
assert torch.equal(one.sequences, two.sequences)
draft.save_pretrained("saved")
torch.save(one.sequences, output)
print(one.acceptance["tau"])
"""


def test_a_stranger_decodes_from_the_hub(hub, tmp_path, run_clean):
    target, inputs = toy_target(), prompts(1)
    toy_draft(target, num_hidden_layers=2).push_to_hub("tester/toy-eagle3")
    target.save_pretrained(tmp_path / "target")
    torch.save(inputs, tmp_path / "inputs.pt")
    where = (tmp_path / "target", tmp_path / "inputs.pt", tmp_path / "output.pt")
    assert float(run_clean(STRANGER, "tester/toy-eagle3", *where).split()[-1]) >= 1
    expected = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.load(tmp_path / "output.pt").tolist() == expected.tolist()


def test_defaults_come_from_the_drafts_generation_settings(tmp_path):
    target = toy_target()
    draft = toy_draft(target)
    inputs = {"input_ids": torch.arange(6, 12)[None], "attention_mask": torch.ones(1, 6, dtype=torch.long)}

    def proposed(draft):
        options = dict(assistant_model=draft, do_sample=False, max_new_tokens=12, return_dict_in_generate=True)
        return len(generate(target, **inputs, **options).acceptance["acceptance_per_position"])

    assert proposed(draft) == draft.generation_config.num_draft_tokens == 2
    for chosen, depth in (({"num_draft_tokens": 5}, 5), ({"tree": {"top_k": 2, "depth": 3, "total_tokens": 6}}, 3)):
        draft.generation_config.update(**chosen)
        draft.save_pretrained(tmp_path)
        again = LlamaForCausalLMEagle3.from_pretrained(tmp_path)
        assert proposed(again) == depth
