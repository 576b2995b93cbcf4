"""The loss: alignment and mask by hand, and the whole against a naive reading position by position."""

import json

import pytest
import torch
from toy import toy_tokenizer

from eagle3_llama.trainer.conversations import tokenize_rows
from eagle3_llama.trainer.loss import STEP_DECAY, chain_loss, predicted_tokens, row_argmax, target_distribution
from eagle3_llama.trainer.records import load_rows

H, V, D = 6, 12, 7


def problem(seed=0, rows=2, length=9, steps=3, draft_vocab=D):
    torch.manual_seed(seed)
    kept = None if draft_vocab == V else torch.randperm(V)[:draft_vocab].sort().values
    return dict(
        states=tuple(torch.randn(rows, length, H, requires_grad=True) for _ in range(steps)),
        head=torch.randn(draft_vocab, H, requires_grad=True),
        target_states=torch.randn(rows, length, H),
        target_head=torch.randn(V, H),
        assistant_mask=torch.rand(rows, length) < 0.7,
        kept_ids=kept,
    )


def naive_loss(states, head, target_states, target_head, assistant_mask, kept_ids):
    """For every slot and step: is it supervised, what does the target say there, what does the draft say."""
    kept = list(range(len(target_head))) if kept_ids is None else kept_ids.tolist()
    total, right, supervised = torch.zeros(()), [0] * len(states), [0] * len(states)
    joint, joint_supervised = [0] * len(states), [0] * len(states)
    for b, row in enumerate(assistant_mask.tolist()):
        for p in range(len(row)):
            alive = True
            for k in range(len(states)):
                if not (p + 2 + k < len(row) and row[p + 1 + k] and row[p + 2 + k]):
                    alive_supervised = False
                    alive = False
                else:
                    alive_supervised = k == 0 or alive_supervised
                    logits = target_head @ target_states[b, p + 1 + k]
                    wanted = torch.tensor([logits[i] for i in kept]).softmax(0)
                    ours = (head @ states[k][b, p]).log_softmax(0)
                    top = int(logits.argmax())
                    if top in kept:
                        total = total - STEP_DECAY**k * (wanted * ours).sum()
                    hit = kept[int(ours.argmax())] == top
                    alive = alive and hit
                    right[k] += hit
                    supervised[k] += 1
                    joint[k] += alive and alive_supervised
                    joint_supervised[k] += alive_supervised
    return total, right, supervised, joint, joint_supervised


@pytest.mark.parametrize("draft_vocab", [D, V])
@pytest.mark.parametrize("seed", range(4))
def test_loss_gradients_and_counts_equal_the_naive_reading(seed, draft_vocab):
    case = problem(seed, draft_vocab=draft_vocab)
    result = chain_loss(**case)
    total, right, supervised, joint, joint_supervised = naive_loss(**case)
    torch.testing.assert_close(result.loss, total)
    leaves = [*case["states"], case["head"]]
    for ours, theirs in zip(torch.autograd.grad(result.loss, leaves), torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert (result.correct.tolist(), result.supervised.tolist()) == (right, supervised)
    assert (result.joint.tolist(), result.joint_supervised.tolist()) == (joint, joint_supervised)


def test_alignment_and_mask_on_a_conversation_written_by_hand(tmp_path):
    messages = [
        {"role": "user", "content": "a0 a1"},
        {"role": "assistant", "content": "a2 a3 a4"},
        {"role": "user", "content": "a5"},
        {"role": "assistant", "content": "a6"},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    rows, _ = load_rows([str(tmp_path / "rows.jsonl")])
    data, _ = tokenize_rows(rows, toy_tokenizer(), 32)
    # 0        1  2  3       4             5  6  7  8       9        10 11      12            13 14
    # <|user|> a0 a1 <|end|> <|assistant|> a2 a3 a4 <|end|> <|user|> a5 <|end|> <|assistant|> a6 <|end|>
    assert data[0]["input_ids"] == [4, 6, 7, 2, 5, 8, 9, 10, 2, 4, 11, 2, 5, 12, 2]
    assert [i for i, m in enumerate(data[0]["assistant_masks"]) if m] == [5, 6, 7, 8, 13, 14]
    # The distribution at a token is learned where it and the next token are the answer's: for the tokens after them.
    mask = torch.tensor([data[0]["assistant_masks"]])
    assert predicted_tokens(mask).nonzero()[:, 1].tolist() == [5, 6, 7, 13]

    states = tuple(torch.zeros(1, 15, H, requires_grad=True) for _ in range(3))
    result = chain_loss(states, torch.randn(V, H), torch.randn(1, 15, H), torch.randn(V, H), mask, None)
    result.loss.backward()
    slots = [state.grad[0].abs().sum(-1).nonzero()[:, 0].tolist() for state in states]
    # Step k at slot p is compared with the target at token p + 1 + k. The first slot after the prompt's pass is p = 4.
    assert slots == [[4, 5, 6, 12], [3, 4, 5, 11], [2, 3, 4, 10]]


def test_positions_whose_target_top1_is_outside_the_draft_vocabulary_are_not_learned():
    case = problem(1)
    top1 = (case["target_states"] @ case["target_head"].T).argmax(-1)  # [B,S]
    outside = ~torch.isin(top1, case["kept_ids"])
    assert outside.any()
    loss = chain_loss(**case).loss
    loss.backward()
    learned = case["states"][0].grad.abs().sum(-1) > 0  # [B,S]
    assert not (learned[:, :-1] & outside[:, 1:]).any()


def test_a_head_of_the_target_in_chunks_gives_the_same_distribution(monkeypatch):
    case = problem(2)
    states = case["target_states"].reshape(-1, H)
    whole = target_distribution(states, case["target_head"], case["kept_ids"])
    monkeypatch.setattr("eagle3_llama.trainer.loss.TARGET_CHUNK", 4)
    for a, b in zip(whole, target_distribution(states, case["target_head"], case["kept_ids"]), strict=True):
        torch.testing.assert_close(a, b)


def gradients(case):
    """Loss and gradients of the leaves that want one."""
    leaves = [x for x in (*case["states"], case["head"]) if x.requires_grad]
    loss = chain_loss(**case).loss
    return [loss, *torch.autograd.grad(loss, leaves)]


def test_draft_logits_in_chunks_give_the_same_loss_and_gradients(monkeypatch):
    case = problem(3, rows=4)
    whole, counts = gradients(case), chain_loss(**case)
    monkeypatch.setattr("eagle3_llama.trainer.loss.LOGITS_BYTES", {"cpu": 2 * D * 4})  # two tokens
    for a, b in zip(whole, gradients(case), strict=True):
        torch.testing.assert_close(a, b)
    for name in ("correct", "supervised", "joint", "joint_supervised", "covered"):
        assert torch.equal(getattr(counts, name), getattr(chain_loss(**case), name))


def test_a_frozen_head_and_evaluation_change_neither_the_loss_nor_the_other_gradients():
    case = problem(4)
    loss, *d_states, _ = gradients(case)
    with torch.no_grad():
        evaluated = chain_loss(**case).loss
    assert not evaluated.requires_grad and torch.equal(evaluated, loss)
    for a, b in zip([loss, *d_states], gradients(case | {"head": case["head"].detach()}), strict=True):
        assert torch.equal(a, b)


def test_under_autocast_only_the_products_are_in_bf16():
    case = problem(5, rows=8, length=32)
    exact = gradients(case)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradients(case)
    for a, b in zip(rounded, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 2e-2 * b.norm()


def test_a_second_backward_through_the_loss_is_an_error_not_a_wrong_gradient():
    loss = chain_loss(**problem(6)).loss
    (loss / 3).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_a_target_that_is_not_finite_shows_in_the_loss():
    case = problem(7)
    case["target_states"][0, 4] = float("nan")
    case["assistant_mask"][0, 4:6] = True
    assert chain_loss(**case).loss.isnan()


@pytest.mark.parametrize("width", [7, 64, 192])
def test_row_argmax_is_argmax_also_with_ties(width):
    torch.manual_seed(0)
    for x in (torch.randn(50, width), torch.randint(0, 4, (50, width)).bfloat16(), torch.zeros(3, width)):
        assert torch.equal(row_argmax(x), x.argmax(-1))
    assert row_argmax(torch.zeros(0, width)).shape == (0,)
