"""An EAGLE-3 draft for a Llama target: the whole model in one file (papers 2503.01840, 2401.15077).

Notable facts, for a reader who knows Llama:
- input of slot p: the target's hidden state at token p (three captured states through `fc`, or the draft's own last
  output), and the embedding of token p + 1; rotary position p; it predicts token p + 2
- layer 0 reads cat[input_layernorm(embedding), hidden_norm(hidden)], so its q/k/v take 2H; with embed_fusion "all"
  the later layers do so too, with "first" they are plain Llama layers whose pre-attention norm is `hidden_norm`
- the residual stream is the raw hidden state and runs through all layers; `norm` is applied for the logits only, and
  the next step receives the stream before it (after it with `norm_output`)
- the head has D rows: `d2t` (an offset: target id = draft id + d2t[draft id]) and `t2d` (membership) exist if D < V
- the embeddings are the target's: never saved, never trained, shared by `bind_target`
- training unrolls K steps (training-time test, TTT): step k shifts tokens and rotary positions by k; a query sees the
  step-0 keys up to its own slot, and of steps 1..k only its own slot's. That equals k cached decoding steps from
  every slot at once: the layers' code is the same, only `attend` differs
- on disk: no `model.` prefix; layers >= 1 of "first" write their norm as `hidden_norm` (SGLang, TensorRT-LLM) and as
  `input_layernorm` (vLLM)

Shapes: B batch, S slots, H hidden, V target vocabulary, D draft vocabulary, K TTT steps, h heads, d head size.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.utils import ModelOutput

from .configuration_eagle3_llama import Eagle3LlamaConfig, check_captured_layers

# What custom_generate proposes by default: a chain of 2 (docs/performance.md), drawn at the target's temperature.
GENERATION = {"num_draft_tokens": 2, "tree": None, "draft_temperature": None}

# attend(layer index, query [B,h,S,d], key, value [B,kv,S,d]) -> [B,h,S,d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotary = tuple[Tensor, Tensor]
KeysValues = tuple[list[Tensor], list[Tensor]]  # of one layer, a tensor [B,kv,S,d] for each TTT step


@dataclass
class Eagle3Output(ModelOutput):
    """One draft step: `logits` [B,S,D] over the draft vocabulary, `hidden_states` [B,S,H] for the next step.

    From the training unroll: `logits` is None and `hidden_states` a tuple of K normed states, ready for `lm_head`.
    """

    logits: Tensor | None = None
    hidden_states: Tensor | tuple[Tensor, ...] | None = None
    cache: DynamicCache | None = None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B,S,heads,d], multiplied in fp32 whatever the model's dtype."""
    x1, x2 = x.float().chunk(2, dim=-1)
    half_cos, half_sin = cos[:, :, None].chunk(2, dim=-1)[0], sin[:, :, None].chunk(2, dim=-1)[0]
    return torch.cat((x1 * half_cos - x2 * half_sin, x2 * half_cos + x1 * half_sin), dim=-1).to(x.dtype)


def repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Repeat key heads [B,kv,S,d] to the query's [B,h,S,d]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, implementation: str) -> Tensor:
    """Softmax attention; mask additive [B,1,S,keys], or None = causal (all keys new) or one query that sees all."""
    key, value = repeat_heads(key, query), repeat_heads(value, query)
    if implementation == "sdpa":
        is_causal = mask is None and query.shape[2] > 1
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
    scores = (query @ key.transpose(2, 3)).float() * query.shape[-1] ** -0.5
    if mask is None and query.shape[2] > 1:
        mask = causal_mask(query.shape[2], key.shape[2], None, scores)
    scores = scores if mask is None else scores + mask
    return scores.softmax(dim=-1).to(value.dtype) @ value


def causal_mask(num_queries: int, num_keys: int, attention_mask: Tensor | None, like: Tensor) -> Tensor:
    """Additive mask [B or 1,1,queries,keys]; queries are the last slots, attention_mask [B,keys] is 0 on padding."""
    slots = torch.arange(num_keys, device=like.device)
    visible = slots <= slots[num_keys - num_queries :, None]
    visible = visible if attention_mask is None else visible & attention_mask[:, None, None].bool()
    # Not -inf: a padding slot may see nothing, and a softmax over nothing is NaN.
    blocked = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    blocked = blocked.masked_fill(~visible, torch.finfo(like.dtype).min)
    return blocked if blocked.dim() == 4 else blocked[None, None]


def ttt_attention(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    attention_mask: Tensor | None,
    documents: list[int] | None = None,
) -> Tensor:
    """Attention of TTT step k, the dense reference: step-0 keys causally, own slot's keys of steps 1..k.

    query [B,h,S,d]; keys and values: k + 1 tensors [B,kv,S,d], step 0 first; attention_mask [B,S], 0 on padding;
    documents: lengths of the documents that S slots consist of, each of which sees only itself.
    """
    num_slots, scale = query.shape[2], query.shape[-1] ** -0.5
    keys, values = [repeat_heads(x, query) for x in keys], [repeat_heads(x, query) for x in values]
    scores = (query @ keys[0].transpose(2, 3)).float() * scale  # [B,h,S,S]
    scores = scores + causal_mask(num_slots, num_slots, attention_mask, scores)
    if documents is not None:
        document = torch.repeat_interleave(torch.tensor(documents, device=query.device))  # [S]: 0, 0, ..., 1, 1, ...
        scores = scores.masked_fill(document[:, None] != document, torch.finfo(scores.dtype).min)
    own = [(query * key).sum(-1, keepdim=True).float() * scale for key in keys[1:]]  # k diagonals [B,h,S,1]
    weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1).to(query.dtype)
    output = weights[..., :num_slots] @ values[0]
    for step, value in enumerate(values[1:]):
        output = output + weights[..., num_slots + step, None] * value
    return output


class Eagle3Attention(nn.Module):
    def __init__(self, config: Eagle3LlamaConfig, layer_idx: int, input_size: int):
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (proj(x).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        heads = (states.transpose(1, 2) for states in (rotate(query, *rotary), rotate(key, *rotary), value))
        output = attend(self.layer_idx, *heads)  # [B,h,S,d]
        return self.o_proj(output.transpose(1, 2).flatten(2))


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3LlamaConfig, layer_idx: int):
        super().__init__()
        self.reads_embeddings = layer_idx == 0 or config.embed_fusion == "all"
        if self.reads_embeddings:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config, layer_idx, config.hidden_size * (2 if self.reads_embeddings else 1))
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, embeds: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        x = self.hidden_norm(hidden)
        if self.reads_embeddings:
            x = torch.cat((self.input_layernorm(embeds), x), dim=-1)  # [B,S,2H]
        hidden = hidden + self.self_attn(x, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LlamaForCausalLMEagle3(PreTrainedModel):
    """The draft. `bind_target` before use; then `forward` with the target's captured states or its own output."""

    config_class = Eagle3LlamaConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _no_split_modules = ["Eagle3Layer"]
    # The second name of a norm that is kept once; see save_pretrained.
    _keys_to_ignore_on_load_unexpected = [r"^layers\.[1-9]\d*\.input_layernorm\.weight$"]

    def __init__(self, config: Eagle3LlamaConfig):
        super().__init__(config)
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        if config.fc_norm:
            norms = [LlamaRMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(Eagle3Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        # Plain attributes, not submodules: neither saved, nor trained, nor cast. The rotary tables stay in fp32, and
        # are made at the first use, since buffers come back as garbage from a load that starts on the meta device.
        object.__setattr__(self, "_embeddings", None)
        object.__setattr__(self, "_rotary", None)
        self.ttt_attention = ttt_attention
        self.generation_config = GenerationConfig(**GENERATION)
        self.post_init()

    # ---- the target's part ----

    def bind_target(self, target: PreTrainedModel) -> "LlamaForCausalLMEagle3":
        """Share the target's input embeddings. Raises ValueError when the target does not fit, naming both sides."""
        for key, own in (("vocab_size", self.config.vocab_size), ("hidden_size", self.config.target_hidden_size)):
            if (theirs := getattr(target.config, key)) != own:
                raise ValueError(f"the draft was made for a target with {key} {own}, but this target's is {theirs}")
        check_captured_layers(self.config.eagle_aux_hidden_state_layer_ids, target.config.num_hidden_layers)
        object.__setattr__(self, "_embeddings", target.get_input_embeddings())
        return self

    def get_input_embeddings(self) -> nn.Module:
        if self._embeddings is None:
            raise ValueError("the draft has no embeddings of its own: call draft.bind_target(target) before using it")
        return self._embeddings

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    # ---- the draft vocabulary ----

    def set_draft_vocabulary(self, d2t: Tensor, t2d: Tensor) -> None:
        """Set offsets d2t int64 [D] and membership t2d bool [V]; ValueError unless they describe the same ids."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            raise ValueError("draft_vocab_size equals vocab_size: there is no draft vocabulary to set")
        kept = d2t + torch.arange(len(d2t), device=d2t.device)
        if d2t.shape != self.d2t.shape or t2d.shape != self.t2d.shape or not torch.equal(kept, t2d.nonzero()[:, 0]):
            raise ValueError(
                f"d2t {tuple(d2t.shape)} and t2d {tuple(t2d.shape)} must list the same ids in ascending order, with "
                f"D = {self.config.draft_vocab_size} and V = {self.config.vocab_size}"
            )
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Token ids of the target for ids of the draft vocabulary, any shape."""
        return draft_ids if self.config.draft_vocab_size == self.config.vocab_size else draft_ids + self.d2t[draft_ids]

    def kept_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary [D], ascending; None when D = V."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # ---- forward ----

    def fuse(self, features: Tensor) -> Tensor:
        """Captured states of the target [B,S,3H], low to high -> [B,S,H]."""
        features = features.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            parts = features.chunk(3, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def step(self, hidden: Tensor, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run all layers: hidden [B,S,H], input_ids [B,S] one token ahead of it -> (normed, state for next step)."""
        embeds = self.get_input_embeddings()(input_ids).to(hidden.device, hidden.dtype)
        rotary = self.rotary_tables(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, embeds, rotary, attend)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        use_cache: bool = False,
        ttt_steps: int | None = None,
        predict_at: Tensor | None = None,
        documents: list[int] | None = None,
        checkpoint_steps: bool = False,
    ) -> Eagle3Output:
        """One draft step over S slots, or with `ttt_steps` the training unroll.

        Args:
            input_ids: [B,S], the token *after* each hidden state (slot p: token p + 1). For the unroll the tokens
                themselves (slot p: token p): it shifts them.
            hidden_states: captured states of the target [B,S,3H], or the draft's own previous output [B,S,H].
            attention_mask: [B, past + S], 0 on padding, either side; or additive [B,1,S,past + S].
            position_ids: [B,S], positions of the hidden states; default: counted over the mask.
            cache: cache of earlier slots; made when `use_cache` and None.
            ttt_steps: K, the number of steps to unroll. Then `hidden_states` of the output are K normed states.
            predict_at: [B], the one slot of each row whose logits [B,1,D] and state [B,1,H] are wanted; default all.
            documents: for the unroll, lengths of the documents that a single row [1,S] consists of. Positions start
                again in each, and nothing is seen or shifted across their ends.
            checkpoint_steps: for the unroll, keep only the states, keys and values of each step, and compute the
                rest of its activations again in the backward pass.
        """
        if hidden_states.shape[-1] == 3 * self.config.target_hidden_size:
            hidden_states = self.fuse(hidden_states)
        past = 0 if cache is None else cache.get_seq_length()
        if documents is not None:
            if attention_mask is not None:
                raise ValueError("attention_mask and documents exclude each other: documents leave no padding")
            position_ids = document_positions(documents, input_ids)
        elif position_ids is None:
            position_ids = default_positions(input_ids, attention_mask, past)
        if ttt_steps is not None:
            context = (position_ids, attention_mask, documents)
            return self._unroll(input_ids, hidden_states, ttt_steps, context, checkpoint_steps)
        if use_cache and cache is None:
            cache = DynamicCache()
        attend = self._cached_attend(hidden_states, attention_mask, cache, past)
        normed, state = self.step(hidden_states, input_ids, position_ids, attend)
        if predict_at is not None:
            rows = torch.arange(len(predict_at), device=predict_at.device)
            normed, state = normed[rows, predict_at][:, None], state[rows, predict_at][:, None]
        return Eagle3Output(self.lm_head(normed), state, cache)

    def _cached_attend(self, hidden: Tensor, mask: Tensor | None, cache: DynamicCache | None, past: int) -> Attend:
        num_queries = hidden.shape[1]
        if mask is not None and mask.dim() == 2:
            # Without padding the kernel's own causal mask does, and a single query sees everything.
            needed = not mask.all() or (past > 0 and num_queries > 1)
            mask = causal_mask(num_queries, past + num_queries, mask, hidden) if needed else None
        elif mask is None and past > 0 and num_queries > 1:
            mask = causal_mask(num_queries, past + num_queries, None, hidden)

        def attend(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if cache is not None:
                key, value = cache.update(key, value, layer_idx)
            return attention(query, key, value, mask, self.config._attn_implementation)

        return attend

    def _unroll(self, tokens: Tensor, hidden: Tensor, steps: int, context: tuple, checkpoint_steps: bool):
        past: list[KeysValues] = [([], []) for _ in self.layers]
        states = []
        for k in range(steps):
            # Step k pairs slot p with the embedding of token p + 1 + k.
            args = (hidden, shift_left(tokens, k + 1, context[2]), k, past, context)
            if checkpoint_steps:
                normed, hidden, past = checkpoint(self._ttt_step, *args, use_reentrant=False)
            else:
                normed, hidden, past = self._ttt_step(*args)
            states.append(normed)
        return Eagle3Output(hidden_states=tuple(states))

    def _ttt_step(self, hidden: Tensor, input_ids: Tensor, k: int, past: list[KeysValues], context: tuple):
        """-> normed, state for the next step, and every layer's keys and values of steps 0..k."""
        position_ids, mask, documents = context
        seen: list[KeysValues] = []

        def attend(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = past[layer_idx]
            seen.append(([*keys, key], [*values, value]))
            return self.ttt_attention(query, *seen[layer_idx], mask, documents)

        return *self.step(hidden, input_ids, position_ids + k, attend), seen

    def rotary_tables(self, position_ids: Tensor) -> Rotary:
        """cos and sin [B,S,d] in fp32."""
        if self._rotary is None:
            # On the device: it is no submodule that would move there, and a copy at every step waits for the GPU.
            object.__setattr__(self, "_rotary", LlamaRotaryEmbedding(self.config).to(position_ids.device))
        return self._rotary(torch.empty(0, dtype=torch.float32, device=position_ids.device), position_ids)

    # ---- loading and saving ----

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ):
        """As PreTrainedModel's, but strict: missing, unexpected or mis-shaped weights are a ValueError."""
        kwargs["ignore_mismatched_sizes"] = True  # they are reported below, by name
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
        if problems:
            raise ValueError(f"the weights of {pretrained_model_name_or_path} do not fit this draft: {problems}")
        # transformers reads generation settings only for models that generate by themselves.
        with contextlib.suppress(OSError):  # a draft without such a file has the defaults
            hub = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "force_download")
            options = {key: kwargs[key] for key in hub if kwargs.get(key) is not None}
            model.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **options)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        """As PreTrainedModel's; the pre-attention norm of plain layers is written under both engines' names."""
        state_dict = dict(self.state_dict() if state_dict is None else state_dict)
        for i, layer in enumerate(self.layers):
            if not layer.reads_embeddings:
                state_dict[f"layers.{i}.input_layernorm.weight"] = state_dict[f"layers.{i}.hidden_norm.weight"].clone()
        super().save_pretrained(save_directory, state_dict=state_dict, **kwargs)
        self.generation_config.save_pretrained(save_directory)
        self._copy_decoding(save_directory)
        if not (Path(save_directory) / "README.md").exists():
            self.write_card(save_directory)

    def write_card(
        self,
        folder: str,
        repo: str | None = None,
        datasets: list[str] | None = None,
        eval_results: list[EvalResult] | None = None,
        **facts: Any,
    ) -> None:
        """Render hub_card.md into `folder`/README.md; `facts` are its other variables. Without the template, nothing.

        The template stays with the package: code that was loaded from a repository leaves that one's card alone.
        """
        template = Path(__file__).with_name("hub_card.md")
        if not template.exists():
            return
        repo = repo or Path(folder).name
        title, adapted = Path(repo).name, facts.get("adapted_draft")
        card = ModelCardData(
            base_model=adapted or self.config.target_name,
            datasets=datasets or None,
            eval_results=eval_results or None,
            model_name=title if eval_results else None,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["eagle3", "speculative-decoding", "draft-model", *([] if adapted else ["custom_generate"])],
        )
        ModelCard.from_template(
            card, template_path=str(template), repo=repo, title=title, config=self.config, **facts
        ).save(Path(folder) / "README.md")

    def _copy_decoding(self, folder: str) -> None:
        source = Path(__file__).with_name("custom_generate") / "generate.py"
        if source.exists():  # not beside code that was loaded from a repository
            (Path(folder) / "custom_generate").mkdir(exist_ok=True)
            shutil.copy(source, Path(folder) / "custom_generate")

    def _upload_modified_files(self, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # transformers 5.24 puts a bare card over ours just before it uploads.
        self.generation_config.save_pretrained(working_dir)
        self._copy_decoding(working_dir)
        self.write_card(working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)


def default_positions(input_ids: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
    """Positions [B,S] of the newest slots, not counting padding."""
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[None]


def document_positions(documents: list[int], input_ids: Tensor) -> Tensor:
    """Positions [1,S] that start again in each document; ValueError unless their lengths make up input_ids [1,S]."""
    if input_ids.shape[0] != 1 or sum(documents) != input_ids.shape[1]:
        raise ValueError(f"documents of {sum(documents)} tokens must make up one row, not {tuple(input_ids.shape)}")
    return torch.cat([torch.arange(length, device=input_ids.device) for length in documents])[None]


def shift_left(tokens: Tensor, count: int, documents: list[int] | None) -> Tensor:
    """tokens [B,S] moved left by count within each document (the row when None); zeros come in, never supervised."""
    parts = [tokens] if documents is None else tokens.split(documents, dim=1)
    shifted = [F.pad(part[:, count:], (0, min(count, part.shape[1]))) for part in parts]
    return torch.cat(shifted, dim=1)


LlamaForCausalLMEagle3.register_for_auto_class("AutoModel")
