"""The draft's arithmetic: unroll = cached decoding = an independent dense reading; masks, dtypes, vocabulary."""

import copy

import pytest
import torch
import torch.nn.functional as F
from toy import ALL_SHAPES, capture, toy_draft, toy_target

STEPS = 4


@pytest.fixture(scope="module")
def target():
    return toy_target()


def batch(target, draft, length=11, rows=2):
    torch.manual_seed(5)
    input_ids = torch.randint(0, target.config.vocab_size, (rows, length))
    with torch.no_grad():
        features = capture(target, input_ids, draft.config.eagle_aux_hidden_state_layer_ids)
    return input_ids, features


def decode(draft, input_ids, features, slot, steps):
    """Logits of `steps` cached draft steps from `slot`, fed with the true tokens: what a decoding loop computes."""
    output = draft(input_ids[:, 1 : slot + 2], features[:, : slot + 1], use_cache=True)
    logits = [output.logits[:, -1]]
    for k in range(1, steps):
        token, hidden = input_ids[:, slot + 1 + k, None], output.hidden_states[:, -1:]
        output = draft(token, hidden, cache=output.cache, use_cache=True)
        logits.append(output.logits[:, -1])
    return torch.stack(logits, 1)  # [B,K,D]


@pytest.mark.parametrize("extra", [{}, {"fc_norm": True, "norm_output": True}])
@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
@torch.no_grad()
def test_unroll_equals_cached_decoding_from_every_slot(target, layers, fusion, extra):
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion, **extra)
    input_ids, features = batch(target, draft)
    states = draft(input_ids, features, ttt_steps=STEPS).hidden_states
    unrolled = torch.stack([draft.lm_head(state) for state in states], 2)  # [B,S,K,D]
    for slot in range(input_ids.shape[1] - STEPS):
        decoded = decode(draft, input_ids, features, slot, STEPS)
        torch.testing.assert_close(unrolled[:, slot], decoded, atol=1e-5, rtol=0)


def naive_unroll(draft, embedding, input_ids, features, steps):
    """An independent reading of the method: every key of every step in one list, one boolean mask, explicit RoPE."""
    config, w = draft.config, dict(draft.named_parameters())
    heads, groups, d = (
        config.num_attention_heads,
        config.num_attention_heads // config.num_key_value_heads,
        config.head_dim,
    )
    B, S = input_ids.shape

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[name]

    def rope(x, position):  # x [B,S,heads,d], position [S]
        frequency = 10000.0 ** (-torch.arange(0, d, 2).float() / d)
        angle = (position[:, None] * frequency).repeat(1, 2)[None, :, None]
        rotated = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * angle.cos() + rotated * angle.sin()

    keys = [[] for _ in range(config.num_hidden_layers)]  # (key [B,heads,d], value, step, slot)
    hidden, outputs = features @ w["fc.weight"].T, []
    for k in range(steps):
        tokens = torch.cat([input_ids[:, k + 1 :], torch.zeros(B, k + 1, dtype=torch.long)], 1)
        for i in range(config.num_hidden_layers):
            p = f"layers.{i}."
            x = norm(hidden, p + "hidden_norm.weight")
            if i == 0 or config.embed_fusion == "all":
                x = torch.cat([norm(embedding[tokens], p + "input_layernorm.weight"), x], -1)
            q, key, value = ((x @ w[f"{p}self_attn.{n}_proj.weight"].T).view(B, S, -1, d) for n in "qkv")
            position = torch.arange(S).float() + k
            q, key = rope(q, position), rope(key, position).repeat_interleave(groups, 2)
            value = value.repeat_interleave(groups, 2)
            keys[i] += [(key[:, s], value[:, s], k, s) for s in range(S)]
            rows = []
            for t in range(S):
                seen = [(a, b) for a, b, step, s in keys[i] if (step == 0 and s <= t) or (step > 0 and s == t)]
                all_keys, all_values = (torch.stack(z, 1) for z in zip(*seen, strict=True))  # [B,n,heads,d]
                score = torch.einsum("bhd,bnhd->bhn", q[:, t], all_keys) / d**0.5
                rows.append(torch.einsum("bhn,bnhd->bhd", score.softmax(-1), all_values))
            attended = torch.stack(rows, 1).reshape(B, S, heads * d)
            hidden = hidden + attended @ w[p + "self_attn.o_proj.weight"].T
            x = norm(hidden, p + "post_attention_layernorm.weight")
            gate = F.silu(x @ w[p + "mlp.gate_proj.weight"].T) * (x @ w[p + "mlp.up_proj.weight"].T)
            hidden = hidden + gate @ w[p + "mlp.down_proj.weight"].T
        outputs.append(norm(hidden, "norm.weight"))
    return outputs


@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_unroll_and_its_gradients_equal_a_naive_recomputation(target, layers, fusion):
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    input_ids, features = batch(target, draft, length=7)
    probe = torch.randn(3, 2, 4, 32)  # any linear function of the outputs at slots whose tokens are all real
    gradients = []
    for states in (
        draft(input_ids, features, ttt_steps=3).hidden_states,
        naive_unroll(draft, target.get_input_embeddings().weight.detach(), input_ids, features, 3),
    ):
        states = torch.stack(tuple(states))[:, :, :4]
        gradients.append(
            (states, torch.autograd.grad((states * probe).sum(), list(draft.parameters()), allow_unused=True))
        )
    torch.testing.assert_close(gradients[0][0], gradients[1][0], atol=2e-5, rtol=1e-4)
    for (name, _), ours, theirs in zip(draft.named_parameters(), gradients[0][1], gradients[1][1], strict=True):
        if name != "lm_head.weight":
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing_for_the_real_slots(target, side, implementation):
    draft = toy_draft(target, num_hidden_layers=2)
    draft.set_attn_implementation(implementation)
    input_ids, features = batch(target, draft, rows=1)
    pad = (3, 0) if side == "left" else (0, 3)
    real = slice(3, None) if side == "left" else slice(0, -3)
    mask = F.pad(torch.ones_like(input_ids), pad)
    padded_ids, padded_features = F.pad(input_ids, pad), F.pad(features, (0, 0, *pad), value=7.0)

    plain = draft(input_ids[:, 1:], features[:, :-1]).logits
    padded = draft(padded_ids.roll(-1, 1), padded_features, attention_mask=mask).logits[:, real][:, :-1]
    torch.testing.assert_close(plain, padded, atol=1e-5, rtol=1e-5)

    plain = draft(input_ids, features, ttt_steps=3).hidden_states[-1]
    padded = draft(padded_ids, padded_features, attention_mask=mask, ttt_steps=3).hidden_states[-1][:, real]
    torch.testing.assert_close(plain[:, :-3], padded[:, :-3], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_eager_and_sdpa_agree_and_so_do_chunks_of_the_prompt(target):
    draft = toy_draft(target, num_hidden_layers=2, embed_fusion="all")
    input_ids, features = batch(target, draft)
    whole = draft(input_ids[:, 1:], features[:, :-1]).logits
    first = draft(input_ids[:, 1:5], features[:, :4], use_cache=True)
    rest = draft(input_ids[:, 5:], features[:, 4:-1], cache=first.cache, use_cache=True)
    torch.testing.assert_close(whole, torch.cat([first.logits, rest.logits], 1), atol=1e-5, rtol=1e-5)
    draft.set_attn_implementation("eager")
    torch.testing.assert_close(whole, draft(input_ids[:, 1:], features[:, :-1]).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rotary_tables_stay_fp32_when_the_model_is_cast(target):
    draft = toy_draft(target)
    positions = torch.tensor([[4000, 4001]])
    exact = draft.rotary_tables(positions)
    cast = copy.deepcopy(draft).bfloat16()
    for a, b in zip(exact, cast.rotary_tables(positions), strict=True):
        assert b.dtype == torch.float32 and torch.equal(a, b)
    input_ids, features = batch(target, draft)
    logits = cast(input_ids[:, 1:], features[:, :-1]).logits
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), draft(input_ids[:, 1:], features[:, :-1]).logits, atol=0.2, rtol=0.1)


def test_using_a_draft_before_binding_says_how(target):
    draft = toy_draft(target)
    object.__setattr__(draft, "_embeddings", None)
    input_ids, features = batch(target, toy_draft(target))
    with pytest.raises(ValueError, match=r"bind_target\(target\)"):
        draft(input_ids, features)


def test_a_target_that_does_not_fit_is_refused_naming_both_sides(target):
    draft = toy_draft(target)
    with pytest.raises(ValueError, match="vocab_size 64.* 80"):
        draft.bind_target(toy_target(vocab_size=80))
    with pytest.raises(ValueError, match="hidden_size 32.* 64"):
        draft.bind_target(toy_target(hidden_size=64))
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids"):
        draft.bind_target(toy_target(num_hidden_layers=4))


def test_embeddings_are_neither_saved_nor_trained(target):
    draft = toy_draft(target)
    assert not [name for name in draft.state_dict() if "embed" in name]
    assert target.get_input_embeddings().weight.data_ptr() not in {p.data_ptr() for p in draft.parameters()}


def test_draft_vocabulary_maps_ids_and_refuses_a_contradiction(target):
    draft = toy_draft(target)
    kept = draft.t2d.nonzero()[:, 0]
    assert torch.equal(draft.to_target_ids(torch.arange(40)), kept)
    with pytest.raises(ValueError, match="ascending"):
        draft.set_draft_vocabulary(draft.d2t + 1, draft.t2d)
    full = toy_draft(target, draft_vocab_size=64)
    assert "d2t" not in full.state_dict() and "t2d" not in full.state_dict()
    assert torch.equal(full.to_target_ids(torch.arange(64)), torch.arange(64))
