"""Documents in one row are the same as documents apart: states, losses, gradients, and what a step allocates."""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_ttt_attention import LargestAllocation, assert_same
from toy import ALL_SHAPES, toy_draft, toy_rows, toy_target, toy_tokenizer
from toy import capture as naive_capture

from eagle3_llama.modeling_eagle3_llama import ttt_attention
from eagle3_llama.trainer.eagle3_config import Eagle3Config
from eagle3_llama.trainer.eagle3_trainer import Eagle3Trainer, collate, pack
from eagle3_llama.trainer.frozen_target import capture, group_documents
from eagle3_llama.trainer.loss import chain_loss
from eagle3_llama.trainer.spare_activations import spare_activations
from eagle3_llama.trainer.ttt_attention import choose_ttt_attention, flash_ttt_attention

LENGTHS = [9, 1, 14, 2, 6]


@pytest.fixture(scope="module")
def target():
    return toy_target()


def documents(seed=5):
    """Tokens [1,T] and a mask in which documents may begin and end within an answer."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (1, sum(LENGTHS)), generator=generator)
    mask = torch.rand(1, sum(LENGTHS), generator=generator) < 0.8
    mask[0, torch.tensor(LENGTHS).cumsum(0)[:-1]] = True
    return tokens, mask


def step(draft, target, tokens, mask, lengths, steps, **options):
    """Loss and counts of a training step, and its gradients."""
    layers = draft.config.eagle_aux_hidden_state_layer_ids
    features, states = capture(target, tokens, lengths, layers)
    output = draft(tokens, features, documents=lengths, ttt_steps=steps, **options)
    head, target_head = draft.lm_head.weight, target.lm_head.weight.detach()
    result = chain_loss(output.hidden_states, head, states, target_head, mask, draft.kept_ids(), lengths)
    names, leaves = zip(*((n, p) for n, p in draft.named_parameters() if p.requires_grad), strict=True)
    gradients = torch.autograd.grad(result.loss, leaves, allow_unused=True, materialize_grads=True)
    counts = {name: getattr(result, name).float() for name in ("correct", "supervised", "joint", "covered")}
    return {"loss": result.loss.detach()} | counts | dict(zip(names, gradients, strict=True))


def steps_apart(draft, target, tokens, mask, steps):
    """The sums of the same over one document at a time, each a row of its own."""
    parts = zip(tokens.split(LENGTHS, dim=1), mask.split(LENGTHS, dim=1), strict=True)
    results = [step(draft, target, *part, None, steps) for part in parts]
    return {name: sum(result[name] for result in results) for name in results[0]}


@pytest.mark.parametrize("attention", [flash_ttt_attention, ttt_attention])
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_packed_losses_and_gradients_equal_those_of_the_documents_apart(target, layers, fusion, steps, attention):
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    tokens, mask = documents()
    draft.ttt_attention = ttt_attention
    apart = steps_apart(draft, target, tokens, mask, steps)
    draft.ttt_attention = attention
    assert_same(step(draft, target, tokens, mask, LENGTHS, steps), apart, rtol=1e-4, atol=1e-5)
    assert apart["supervised"][0] >= 10


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_packed_losses_and_gradients_equal_those_of_the_documents_apart_on_cuda(layers, fusion):
    target = toy_target().cuda()
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion).cuda()
    tokens, mask = (x.cuda() for x in documents())
    apart = steps_apart(draft, target, tokens, mask, 7)
    draft.ttt_attention = flash_ttt_attention
    assert_same(step(draft, target, tokens, mask, LENGTHS, 7), apart, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_packed_rows_in_bf16_are_near_fp32(target, layers, fusion, steps):
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    tokens, mask = documents()
    exact = steps_apart(draft, target, tokens, mask, steps)

    def in_bf16(query, keys, values, mask, documents):
        keys, values = [x.bfloat16() for x in keys], [x.bfloat16() for x in values]
        return flash_ttt_attention(query.bfloat16(), keys, values, mask, documents).float()

    draft.ttt_attention = in_bf16
    ours = step(draft, target, tokens, mask, LENGTHS, steps)
    flat, expected = (torch.cat([x[n].flatten() for n, _ in draft.named_parameters()]) for x in (ours, exact))
    assert (flat - expected).norm() < 2e-2 * expected.norm()


def test_a_document_does_not_feel_its_neighbours(target):
    draft = toy_draft(target, num_hidden_layers=2, embed_fusion="all")
    draft.ttt_attention = flash_ttt_attention
    tokens, mask = documents()
    mask[:, 9:] = False  # only the first document is learned
    other = tokens.clone()
    other[:, 9:] = (tokens[:, 9:] + 7) % 64
    ours, theirs = (step(draft, target, x, mask, LENGTHS, 3) for x in (tokens, other))
    assert_same(ours, theirs, rtol=0, atol=1e-7)
    with_one_document = step(draft, target, other, mask, None, 3)
    assert abs(with_one_document["lm_head.weight"] - ours["lm_head.weight"]).max() < 1e-6
    mask[:, 9:] = True  # the check itself: unseparated rows do leak
    joined, apart = (step(draft, target, tokens, mask, lengths, 3)["loss"] for lengths in (None, LENGTHS))
    assert abs(joined - apart) > 0.1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("tokens_at_once", [None, 1, 12, 1000])
def test_the_target_reads_documents_as_if_they_were_alone(implementation, tokens_at_once):
    target = toy_target()
    target.set_attn_implementation(implementation)
    tokens, layers = documents()[0], [2, 4, 5]
    features, last = capture(target, tokens, LENGTHS, layers, tokens_at_once)
    with torch.no_grad():
        parts = tokens.split(LENGTHS, dim=1)
        expected = torch.cat([naive_capture(target, part, layers) for part in parts], dim=1)
        expected_last = torch.cat([target.get_decoder()(part).last_hidden_state for part in parts], dim=1)
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(last, expected_last)
    assert target.config._attn_implementation == implementation


def test_documents_are_grouped_in_order_up_to_the_limit():
    assert group_documents([5, 5, 3, 20, 1, 1], 10) == [[5, 5], [3], [20], [1, 1]]
    assert group_documents([5, 5], None) == [[5, 5]]


def test_packing_fills_rows_and_loses_nothing():
    rows = toy_rows(40)
    packed = pack(rows, 64)
    assert len(packed) < len(rows) and max(map(len, packed["input_ids"])) <= 64
    batch = collate(list(packed))
    assert sum(batch["documents"]) == batch["input_ids"].shape[1] == sum(map(len, rows["input_ids"]))
    parts = zip(*(batch[name][0].split(batch["documents"]) for name in ("input_ids", "assistant_masks")), strict=True)
    whole = sorted(zip(rows["input_ids"], rows["assistant_masks"], strict=True))
    assert sorted((ids.tolist(), mask.tolist()) for ids, mask in parts) == whole


@pytest.mark.parametrize(
    "option", [{}, {"packing": True}, {"train_sampling_strategy": "group_by_length"}, {"optim": "adafactor"}]
)
def test_training_goes_over_every_token_once(tmp_path, target, option):
    rows = toy_rows(12)
    args = Eagle3Config(
        output_dir=str(tmp_path),
        max_length=48,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        draft_vocab_size=40,
        ttt_steps=3,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        **option,
    )
    trainer = Eagle3Trainer(target=target, args=args, train_dataset=rows, processing_class=toy_tokenizer())
    seen = []
    trainer._chain_loss, original = lambda model, x: (seen.append(x), original(model, x))[1], trainer._chain_loss
    trainer.train()
    documents = [part.tolist() for x in seen for part in x["input_ids"][0].split(x["documents"])]
    assert sorted(documents) == sorted(rows["input_ids"])
    lengths = [len(x["documents"]) for x in seen]
    assert (max(lengths) > 2) == bool(option.get("packing"))


def step_and_kept_elements(draft, target, **options):
    """A step's losses and gradients, and the elements of all tensors that the graph of the unroll keeps alive."""
    layers = draft.config.eagle_aux_hidden_state_layer_ids
    tokens, mask = documents()
    features, _ = capture(target, tokens, LENGTHS, layers)
    gc.collect()
    before = {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)}
    saved = {}

    def keep(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = draft(tokens, features, documents=LENGTHS, ttt_steps=7, **options)
    # What Python holds, closures included, beside what autograd holds.
    held = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and id(x) not in before]
    saved |= {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // x.element_size() for x in held}
    weights = {x.untyped_storage().data_ptr() for x in draft.parameters()}
    elements = sum(size for pointer, size in saved.items() if pointer not in weights)
    del output, held
    return step(draft, target, tokens, mask, LENGTHS, 7, **options), elements


@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_checkpointed_steps_and_spared_activations_have_equal_gradients_and_keep_less(target, layers, fusion):
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    draft.ttt_attention = flash_ttt_attention
    whole, kept_by_whole = step_and_kept_elements(draft, target)
    checkpointed, kept_by_checkpoints = step_and_kept_elements(draft, target, checkpoint_steps=True)
    spare_activations(draft)
    spared, kept_by_sparing = step_and_kept_elements(draft, target)
    assert_same(checkpointed, whole, rtol=0, atol=0)
    assert_same(spared, whole, rtol=0, atol=0)
    assert kept_by_sparing < 0.75 * kept_by_whole
    assert kept_by_checkpoints < 0.5 * kept_by_whole


def test_activations_are_spared_with_a_lora_on_every_projection(target):
    draft = toy_draft(target, num_hidden_layers=2)
    draft.ttt_attention = flash_ttt_attention
    projections = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    get_peft_model(draft, LoraConfig(target_modules=projections, init_lora_weights=False))
    whole, kept_by_whole = step_and_kept_elements(draft, target)
    spare_activations(draft)
    spared, kept_by_sparing = step_and_kept_elements(draft, target)
    assert_same(spared, whole, rtol=0, atol=0)
    assert kept_by_sparing < 0.85 * kept_by_whole


def test_a_packed_step_with_its_target_allocates_neither_slots_by_slots_nor_tokens_by_vocabulary(monkeypatch):
    monkeypatch.setattr("eagle3_llama.trainer.loss.TARGET_CHUNK", 64)
    monkeypatch.setattr("eagle3_llama.trainer.loss.LOGITS_BYTES", {"cpu": 64 * 896 * 4})
    target = toy_target(vocab_size=1024, hidden_size=16, num_attention_heads=1, num_key_value_heads=1)
    draft = toy_draft(target, draft_vocab_size=896, num_hidden_layers=2)
    draft.ttt_attention = flash_ttt_attention
    lengths = [200, 12, 300]
    tokens = torch.randint(0, 1024, (1, 512))
    with LargestAllocation() as largest:
        step(draft, target, tokens, torch.ones(1, 512), lengths, 3)
    assert largest.elements <= 64 * 1024, largest.where  # one chunk of the target's logits
    draft.ttt_attention = ttt_attention
    with LargestAllocation() as dense:
        step(draft, target, tokens, torch.ones(1, 512), lengths, 3)
    assert dense.elements >= 512 * 512, "the check does not see what it should"


def test_the_attention_is_chosen_by_device_and_forced_by_name():
    assert choose_ttt_attention("auto", torch.device("cpu")) is flash_ttt_attention
    assert choose_ttt_attention("auto", torch.device("mps")) is ttt_attention
    assert choose_ttt_attention("eager", torch.device("cuda")) is ttt_attention
    with pytest.raises(ValueError, match="eager"):
        Eagle3Config(output_dir="x", ttt_attention="flex", use_cpu=True)


def test_conversations_may_be_cut_shorter_than_the_rows_they_are_packed_into(tmp_path, target):
    options = dict(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, draft_vocab_size=40)
    options |= dict(max_length=24, ttt_steps=3, packing=True)
    make = dict(target=target, processing_class=toy_tokenizer())
    trainer = Eagle3Trainer(args=Eagle3Config(**options, max_document_length=12), train_dataset=toy_rows(6), **make)
    assert trainer.train_dataset["seq_lengths"][:] == [[12, 12]] * 3
    with pytest.raises(ValueError, match="raise max_length 24"):
        Eagle3Config(**options, max_document_length=25)


def test_rows_that_cannot_be_packed_are_refused_by_name(tmp_path, target):
    args = Eagle3Config(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    make = dict(target=target, args=args, processing_class=toy_tokenizer())
    with pytest.raises(ValueError, match="packed already"):
        Eagle3Trainer(train_dataset=pack(toy_rows(8), 64), **make)
    with pytest.raises(ValueError, match="IterableDataset cannot"):
        Eagle3Trainer(train_dataset=toy_rows(8).to_iterable_dataset(), **make)


def test_documents_that_do_not_make_up_the_row_or_meet_a_mask_are_refused(target):
    draft = toy_draft(target)
    with pytest.raises(ValueError, match="one row"):
        draft(torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 9, 96), documents=[4, 4], ttt_steps=1)
    with pytest.raises(ValueError, match="exclude each other"):
        mask = torch.ones(1, 9)
        draft(torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 9, 96), mask, documents=[4, 5], ttt_steps=1)
