"""The linear-memory attention against the dense reference, and what a training step allocates."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import ALL_SHAPES, toy_draft, toy_target

from eagle3_llama.modeling_eagle3_llama import ttt_attention
from eagle3_llama.trainer.loss import chain_loss
from eagle3_llama.trainer.ttt_attention import flash_ttt_attention

PADDINGS = ["none", "right", "left", "holes"]


@pytest.fixture(scope="module")
def target():
    return toy_target()


def padding_mask(kind, rows, slots):
    """[B,S]; the last row has no padding. None for "none"."""
    mask = torch.ones(rows, slots, dtype=torch.long)
    mask[0, {"none": slice(0), "right": slice(-4, None), "left": slice(0, 4), "holes": slice(3, 6)}[kind]] = 0
    return None if kind == "none" else mask


def unroll(draft, attention, steps, padding="none", device="cpu", autocast=False):
    """K states [K,B,S,H], zero on padding, and the gradients of a fixed linear function of them."""
    draft.ttt_attention = attention
    generator = torch.Generator().manual_seed(3)
    rows, slots, hidden = 2, 21, draft.config.hidden_size
    input_ids = torch.randint(0, draft.config.vocab_size, (rows, slots), generator=generator).to(device)
    features = torch.randn(rows, slots, 3 * hidden, generator=generator).to(device)
    probe = torch.randn(steps, rows, slots, hidden, generator=generator).to(device)
    mask = padding_mask(padding, rows, slots)
    mask = mask if mask is None else mask.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        states = torch.stack(draft(input_ids, features, mask, ttt_steps=steps).hidden_states)
    real = torch.ones_like(states) if mask is None else mask[None, :, :, None]
    states = states * real
    names, leaves = zip(*draft.named_parameters(), strict=True)
    gradients = torch.autograd.grad((states * probe).sum(), leaves, allow_unused=True)
    return {"states": states} | {k: g for k, g in zip(names, gradients, strict=True) if k != "lm_head.weight"}


def assert_same(ours, theirs, rtol, atol):
    """Element by element; `atol` is relative to the largest value of each tensor."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            ours[name].float(), expected, rtol=rtol, atol=atol * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


def relative_errors(ours, theirs):
    """|ours - theirs| / |theirs| of each tensor."""
    return [((ours[name].float() - x).norm() / x.norm()).item() for name, x in theirs.items()]


def relative_error(ours, theirs):
    """The same of all tensors together."""
    ours, theirs = (torch.cat([x[name].float().flatten() for name in theirs]) for x in (ours, theirs))
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_states_and_gradients_equal_the_dense_reference(layers, fusion, steps, key_heads):
    target = toy_target(num_key_value_heads=key_heads)
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    assert_same(unroll(draft, flash_ttt_attention, steps), unroll(draft, ttt_attention, steps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", PADDINGS[1:])
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_padding_on_either_side_and_holes_equal_the_dense_reference(target, layers, fusion, steps, padding):
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    ours, theirs = (unroll(draft, f, steps, padding) for f in (flash_ttt_attention, ttt_attention))
    assert_same(ours, theirs, rtol=1e-4, atol=1e-5)


def attention_in_bf16(query, keys, values, mask, documents=None):
    keys, values = [x.bfloat16() for x in keys], [x.bfloat16() for x in values]
    return flash_ttt_attention(query.bfloat16(), keys, values, mask, documents).float()


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_bf16_is_near_fp32(target, layers, fusion, steps):
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    exact = unroll(draft, ttt_attention, steps)
    assert relative_error(unroll(draft, attention_in_bf16, steps), exact) < 2e-2
    # The rest of a draft in bf16 costs several times as much; with it, nearly all of the error is not attention's.
    error, dense = (
        relative_error(unroll(draft, f, steps, autocast=True), exact) for f in (flash_ttt_attention, ttt_attention)
    )
    assert error < 1.25 * dense


def attention_case(dtype, steps, padding, device="cpu", slots=37):
    """Output and all gradients of both implementations in `dtype`, and of the reference in fp32."""
    generator = torch.Generator().manual_seed(4)

    def draw(heads):
        return torch.randn(2, heads, slots, 16, generator=generator).to(device, dtype)

    query, probe = draw(9), draw(9)
    keys, values = [draw(3) for _ in range(steps)], [draw(3) for _ in range(steps)]
    values = [value.transpose(1, 2).contiguous().transpose(1, 2) for value in values]  # as projections lie in memory
    mask = padding_mask(padding, 2, slots)
    real = torch.ones(2, slots) if mask is None else mask
    probe, mask = probe * real.to(device, dtype)[:, None, :, None], mask if mask is None else mask.to(device)

    def run(attention, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (query, *keys, *values)]
        output = attention(inputs[0], inputs[1 : steps + 1], inputs[steps + 1 :], mask)
        gradients = torch.autograd.grad((output * probe.to(dtype)).sum(), inputs)
        return {"output": output * probe.ne(0)} | {f"d_{i}": gradient for i, gradient in enumerate(gradients)}

    return run(flash_ttt_attention, dtype), run(ttt_attention, torch.float32)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("steps", [1, 4])
def test_attention_alone(steps, padding):
    ours, theirs = attention_case(torch.float32, steps, padding)
    assert_same(ours, theirs, rtol=1e-4, atol=1e-6)
    assert max(relative_errors(*attention_case(torch.bfloat16, steps, padding))) < 1e-2


def test_a_second_backward_gives_the_same_gradients():
    inputs = [torch.randn(1, heads, 8, 8, requires_grad=True) for heads in (4, 2, 2, 2, 2)]
    output = flash_ttt_attention(inputs[0], inputs[1:3], inputs[3:], None).sum()
    first = torch.autograd.grad(output, inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(output, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    output = ttt_attention(inputs[0], inputs[1:3], inputs[3:], None).sum()  # whose gradient is one number, expanded
    for a, b in zip(first, torch.autograd.grad(output, inputs), strict=True):
        torch.testing.assert_close(a, b)


class LargestAllocation(TorchDispatchMode):
    """Records the output of the most elements of any operation, forward and backward."""

    def __init__(self):
        super().__init__()
        self.elements, self.where = 0, ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            # What is stored, not what is seen: an expanded mask costs nothing.
            if (
                isinstance(x, torch.Tensor)
                and (size := x.untyped_storage().nbytes() // x.element_size()) > self.elements
            ):
                self.elements, self.where = size, f"{function} -> {tuple(x.shape)}"
        return result


def largest_allocation(attention, padding="right"):
    """Of one training step with 1 head, S 512, H 16, V 1024, D 896: S x S = 262144, tokens x V = 524288."""
    slots, vocabulary = 512, 1024
    target = toy_target(vocab_size=vocabulary, hidden_size=16, num_attention_heads=1, num_key_value_heads=1)
    draft = toy_draft(target, draft_vocab_size=896, num_hidden_layers=2)
    draft.ttt_attention = attention
    input_ids = torch.randint(0, vocabulary, (1, slots))
    target_states = torch.randn(1, slots, 16)
    mask = padding_mask(padding, 2, slots)[:1]
    with LargestAllocation() as largest:
        output = draft(input_ids, torch.randn(1, slots, 48), mask, ttt_steps=3)
        head, kept = target.lm_head.weight.detach(), draft.kept_ids()
        chain_loss(output.hidden_states, draft.lm_head.weight, target_states, head, mask, kept).loss.backward()
    return largest


@pytest.mark.parametrize("padding", ["right", "left"])
def test_a_training_step_allocates_neither_slots_by_slots_nor_tokens_by_vocabulary(monkeypatch, padding):
    monkeypatch.setattr("eagle3_llama.trainer.loss.TARGET_CHUNK", 64)
    monkeypatch.setattr("eagle3_llama.trainer.loss.LOGITS_BYTES", {"cpu": 64 * 896 * 4})
    largest = largest_allocation(flash_ttt_attention, padding)
    assert largest.elements <= 64 * 1024, largest.where  # one chunk of the target's logits
    dense = largest_allocation(ttt_attention, padding)
    assert dense.elements >= 512 * 512, "the check does not see what it should"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 5e-3), (torch.float32, 1e-4)]
)
def test_attention_alone_on_cuda(monkeypatch, dtype, tolerance, steps, padding):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert max(relative_errors(*attention_case(dtype, steps, padding, device="cuda"))) < tolerance


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_unroll_on_cuda(target, layers, fusion, padding):
    draft = toy_draft(copy.deepcopy(target).cuda(), num_hidden_layers=layers, embed_fusion=fusion).cuda()
    exact = unroll(draft, ttt_attention, 7, padding, "cuda")
    assert relative_error(unroll(draft, flash_ttt_attention, 7, padding, "cuda"), exact) < 1e-4
    error, dense = (
        relative_error(unroll(draft, f, 7, padding, "cuda", autocast=True), exact)
        for f in (flash_ttt_attention, ttt_attention)
    )
    assert error < 1.25 * dense


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_on_cuda_grows_linearly_with_the_sequence():
    peaks = []
    for slots in (2048, 4096):
        query, key = (torch.randn(1, n, slots, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2))
        query.requires_grad_()
        mask = F.pad(torch.ones(1, slots - 4, device="cuda"), (4, 0))
        torch.cuda.reset_peak_memory_stats()
        flash_ttt_attention(query, [key, key], [key, key], mask).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 2.2 * peaks[0], peaks
