"""Lossless decoding of a Llama target with its EAGLE-3 draft, run by transformers as a `custom_generate`:

    target.generate(**inputs, custom_generate="you/llama3-8b-eagle3", trust_remote_code=True,
                    assistant_model=draft, max_new_tokens=256)

Notable facts:
- each step the draft proposes a tree of tokens, the target reads it in one pass, and a walk down from the root keeps
  what the target itself says. A chain is the tree with top_k 1
- slot s of a cache belongs to token s of its row. A pass writes at slots chosen per row, so rows advance at their own
  pace and a rejected slot is simply written over; only the accepted path of a tree is moved
- the draft pairs the target's state of token s with the embedding of token s + 1 at rotary position s. The slots it
  wrote from its own states are written over when the target's states arrive
- greedy: the draft's likeliest tokens, kept while they are the target's argmax
- sampled: a node's children are drawn from the draft's q without replacement (Gumbel top-k) and tried in that order:
  accept with min(1, p/q), else p <- max(p - q, 0), q <- q without that child, both renormalised; p is the target's
  distribution after all processors and warpers
- which children a sampled tree keeps depends on the mass that was left before each was drawn, never on the token that
  was drawn: choosing by its own probability would favour likely tokens and bend the distribution

Shapes: B rows, P prompt tokens, N nodes of a tree, M candidates for them, k children a node, b nodes expanded at once,
E in all, n slots, w slots written by a pass, H hidden, V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

# Values at which options of transformers change nothing here; with any other they would be ignored, so it is refused.
NEUTRAL = {
    (): "dola_layers constraints force_words_ids prompt_lookup_num_tokens assistant_early_exit speculation_type "
    "assistant_ensemble_weight max_matching_ngram_size cache_config prefill_chunk_size compile_config",
    (
        0,
        False,
    ): "output_scores output_logits output_attentions output_hidden_states token_healing is_assistant use_mtp "
    "penalty_alpha diversity_penalty",
    (1, True): "num_beams num_beam_groups guidance_scale use_cache",
    ("dynamic",): "cache_implementation",
    (20,): "num_assistant_tokens",
    ("constant",): "num_assistant_tokens_schedule",
    (0.4,): "assistant_confidence_threshold",
    (10,): "assistant_lookbehind target_lookbehind",
}
STATEFUL = (
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
TRUNCATING = tuple(
    getattr(logits_process, f"{name}LogitsWarper") for name in "TopK TopP MinP TopH Typical Epsilon Eta".split()
)
PREFIX_FREE = (  # these do not read the tokens so far
    *TRUNCATING,
    logits_process.TemperatureLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`sequences`, and `acceptance`: steps (passes of the target after the prompt's), accepted (draft tokens kept in
    each, a list a row), acceptance_per_position (share of steps that kept draft token i and all before it), and tau:
    new tokens per row and step, which counts the target's own token, so that decoding without a draft has tau 1."""

    acceptance: dict[str, Any] | None = None


@dataclass
class Drafting:
    """How the draft proposes: a tree of `depth` levels, `top_k` children a node, `total_tokens` of it kept."""

    draft: PreTrainedModel
    top_k: int
    depth: int
    total_tokens: int
    temperature: float
    generator: torch.Generator | None


@dataclass
class Tree:
    """Proposed tokens; node 0 is the root, the newest token of the row."""

    ids: Tensor  # [B,N]
    depth: int = 0
    ancestors: Tensor | None = None  # bool [B or 1,N,N], with oneself
    children: Tensor | None = None  # [B,N,k] nodes in the order drawn, 0 for none
    q: Tensor | None = None  # [B,E,D] the distributions that children were drawn from
    owner: Tensor | None = None  # [B,N] which of them is a node's


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    assistant_model: PreTrainedModel | str | None = None,
    num_draft_tokens: int | None = None,
    tree: dict[str, int] | None = None,
    draft_temperature: float | None = None,
    generator: torch.Generator | None = None,
    generation_config: GenerationConfig | None = None,
    stopping_criteria: list | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """`model.generate` with a draft: the same tokens when greedy, the same distribution when sampled.

    Args:
        assistant_model: the draft, or its repo or folder (then loaded in each call).
        num_draft_tokens: length of the proposed chain. The default of this and the next two stands in the draft's
            generation_config.json.
        tree: a tree instead of a chain: `top_k` children a node, `depth`, and `total_tokens` kept of it.
        draft_temperature: of the distribution the draft proposes from; default the target's.
        generator: source of the random numbers; default torch's own.

    The other arguments are those of transformers' `generate`.

    Raises:
        ValueError: names an option that is not supported with a draft, before a model runs.
    """
    hub = {key: kwargs.pop(key) for key in ("revision", "token", "cache_dir", "local_files_only") if key in kwargs}
    own = {key: kwargs.pop(key, None) for key in ("logits_processor", "prefix_allowed_tokens_fn")}
    for key in ("synced_gpus", "negative_prompt_ids", "negative_prompt_attention_mask", "assistant_tokenizer"):
        own[key] = None
        if kwargs.pop(key, None) is not None:
            raise ValueError(f"{key} is not supported with a draft: remove it")
    config, rest = model._prepare_generation_config(generation_config, **kwargs)
    for key in rest.keys() - {"input_ids", "attention_mask", "position_ids"}:
        if rest[key] is not None:
            raise ValueError(f"{key} is not supported with a draft: remove it")
    for values, names in NEUTRAL.items():
        for key in names.split():
            if (value := getattr(config, key)) is not None and value not in values:
                raise ValueError(f"{key}={value!r} is not supported with a draft: remove it")
    if config.num_return_sequences != 1 and not config.do_sample:
        raise ValueError(f"num_return_sequences={config.num_return_sequences} needs do_sample=True")
    if (attention := model.config._attn_implementation) not in ("sdpa", "eager"):
        raise ValueError(f"attn_implementation={attention!r} is not supported with a draft: load with 'sdpa'")
    draft = load_draft(assistant_model, model, hub)
    tree = choose_proposal(draft, num_draft_tokens, tree)
    if draft_temperature is None:
        draft_temperature = draft.generation_config.to_dict().get("draft_temperature")
    if draft_temperature is None:
        draft_temperature = config.temperature if config.do_sample else 1.0
    if not draft_temperature > 0:
        raise ValueError(f"draft_temperature is {draft_temperature}; it must be above 0")

    stopping_criteria = list(stopping_criteria or [])
    if config.stop_strings is not None:
        # transformers 5.24 loses the tokenizer on the way to a callable, so this criterion is made here.
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer: pass tokenizer=")
        stopping_criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
        kwargs["stop_strings"] = None
    drafting = Drafting(draft, **tree, temperature=draft_temperature, generator=generator)
    loop = partial(decode, drafting=drafting, streamer=streamer)
    return GenerationMixin.generate(
        model,
        inputs=inputs,
        generation_config=generation_config,
        stopping_criteria=stopping_criteria,
        custom_generate=loop,
        **own,
        **kwargs,
    )


def load_draft(draft: PreTrainedModel | str, target: PreTrainedModel, hub: dict[str, Any]) -> PreTrainedModel:
    """The draft itself or its repo or folder -> the draft, bound to the target. ValueError when they do not fit."""
    if isinstance(draft, str):
        draft = AutoModel.from_pretrained(draft, trust_remote_code=True, dtype=target.dtype, **hub).to(target.device)
    if not hasattr(draft, "bind_target"):
        raise ValueError(f"assistant_model is {type(draft).__name__}: pass an EAGLE-3 draft, or its repo or folder")
    draft.bind_target(target)
    if draft.device != target.device:
        raise ValueError(f"the draft is on {draft.device}, the target on {target.device}: move one of them")
    return draft


def choose_proposal(draft: PreTrainedModel, num_draft_tokens: int | None, tree: dict | None) -> dict[str, int]:
    """top_k, depth and total_tokens, from the call or else from the draft's generation settings."""
    if tree is not None and num_draft_tokens is not None:
        raise ValueError("num_draft_tokens is the length of a chain: pass it or tree, not both")
    if tree is None and num_draft_tokens is None:
        settings = draft.generation_config.to_dict()
        num_draft_tokens, tree = settings["num_draft_tokens"], settings.get("tree")
    if tree is None:
        tree = {"top_k": 1, "depth": num_draft_tokens, "total_tokens": num_draft_tokens}
    if set(tree) != {"top_k", "depth", "total_tokens"} or not all(isinstance(v, int) and v > 0 for v in tree.values()):
        raise ValueError(f"num_draft_tokens, or tree's top_k, depth and total_tokens, must be 1 or more: {tree}")
    if tree["top_k"] > draft.config.draft_vocab_size:
        raise ValueError(f"top_k is {tree['top_k']}, but the draft knows only {draft.config.draft_vocab_size} tokens")
    return tree


def decode(
    target: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: list,
    stopping_criteria: list,
    generation_config: GenerationConfig,
    drafting: Drafting,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The decoding loop, with everything prepared by transformers; input_ids [B,P].

    transformers takes an argument that is named here away from its own preparation: name none of its options.
    """
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"streamer writes a single row, but the batch has {len(input_ids)}")
    check_processors(logits_processor, input_ids, target.config.vocab_size)
    mask, positions = model_kwargs["attention_mask"], model_kwargs["position_ids"]
    loop = Loop(
        target, drafting, input_ids, mask, positions, logits_processor, stopping_criteria, generation_config.do_sample
    )
    if streamer is not None:
        streamer.put(input_ids.cpu())
    loop.prefill()
    while True:
        if streamer is not None:
            streamer.put(loop.tokens[0, loop.lengths[0] - loop.passes[-1][1][0] : loop.lengths[0]].cpu())
        if not loop.remaining:
            break
        loop.step()
    if streamer is not None:
        streamer.end()
    sequences = loop.tokens[:, : loop.stop_at.max()]
    if loop.pads:
        past = torch.arange(sequences.shape[1], device=sequences.device) >= loop.stop_at[:, None]
        sequences = torch.where(past, generation_config._pad_token_tensor.to(past.device), sequences)
    if generation_config.return_dict_in_generate:
        return SpeculativeOutput(sequences=sequences, acceptance=loop.acceptance())
    return sequences


def check_processors(logits_processor: list, input_ids: Tensor, vocab_size: int) -> None:
    """ValueError for a processor that remembers its calls, some of which are for tokens that are rejected later."""
    for processor in logits_processor:
        name, stateful = type(processor).__name__, isinstance(processor, STATEFUL)
        if not type(processor).__module__.startswith("transformers."):
            before = repr(vars(processor))
            processor(input_ids, torch.zeros(len(input_ids), vocab_size, device=input_ids.device))
            stateful = repr(vars(processor)) != before
        if stateful:
            raise ValueError(f"logits_processor {name} keeps a state from call to call: not supported with a draft")
        if isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor) and len(input_ids) > 1:
            raise ValueError("prefix_allowed_tokens_fn is supported with a draft for a single row only")


class SlotCache(DynamicCache):
    """Keys and values that each pass writes at slots of its choice, row by row, in buffers that grow rarely."""

    def __init__(self):
        super().__init__()
        self.buffers: list[list[Tensor]] = []  # of each layer keys and values [B,n,kv heads,head size]

    def at(self, index: tuple, length: int) -> "SlotCache":
        """The next pass writes at buffer[index] and reads the first `length` slots."""
        self.index, self.length = index, length
        return self

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write key and value [B,kv heads,w,head size]; returns what is read [B,kv heads,length,head size]."""
        if layer_idx == len(self.buffers):
            self.buffers.append([x.transpose(1, 2)[:, :0] for x in (key, value)])
        layer = self.buffers[layer_idx]
        for i, new in enumerate((key.transpose(1, 2), value.transpose(1, 2))):
            if (short := self.length - layer[i].shape[1]) > 0:
                # Zeros: a masked slot takes part with weight 0, and 0 * NaN is NaN.
                space = new.new_zeros(new.shape[0], short + 256, *new.shape[2:])
                layer[i] = torch.cat((layer[i], space), dim=1)
            layer[i][self.index] = new
        return layer[0][:, : self.length].transpose(1, 2), layer[1][:, : self.length].transpose(1, 2)

    def move(self, rows: Tensor, source: Tensor, destination: Tensor) -> None:
        """Copy slots `source` [B,w] to `destination` [B,w]; rows [B,1]."""
        for layer in self.buffers:
            for buffer in layer:
                buffer[rows, destination] = buffer[rows, source]


class Loop:
    """One decoding loop. Row r has `length[r]` tokens, the newest of which is in neither cache.

    `lengths` is the same on the host. A row's text ends at `stop_at[r]`, it is decoded up to `goal[r]`, and
    `remaining` is what the row furthest from its goal still needs. Passes write from slot `base[r]` on (`bases`).
    """

    def __init__(self, target, drafting, input_ids, prompt_mask, position_ids, processors, criteria, sampled):
        batch, width = input_ids.shape
        device = target.device
        self.target, self.draft, self.drafting, self.sampled = target, drafting.draft, drafting, sampled
        self.prompt_mask, self.position_ids = prompt_mask, position_ids
        self.processors, self.prefix_free = processors, all(type(p) in PREFIX_FREE for p in processors)
        self.truncating = logits_process.LogitsProcessorList(p for p in processors if type(p) in TRUNCATING)
        eos = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
        self.eos_ids = torch.cat(eos).to(device) if eos else None
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.criteria = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        self.layers, self.kept_ids = self.draft.config.eagle_aux_hidden_state_layer_ids, self.draft.kept_ids()
        self.target_cache, self.draft_cache = SlotCache(), SlotCache()
        limit = criteria.max_length
        self.rows = torch.arange(batch, device=device)[:, None]
        self.tokens = torch.zeros(batch, limit + drafting.depth + 1, dtype=torch.long, device=device)
        self.tokens[:, :width] = input_ids
        self.shift = position_ids[:, -1:] - (width - 1)  # position of a slot = slot + shift
        self.length, self.lengths = torch.full((batch,), width, device=device), [width] * batch
        self.stop_at = self.goal = torch.full((batch,), limit, device=device)
        self.remaining = limit - width
        self.base, self.bases = torch.zeros(batch, 1, dtype=torch.long, device=device), [0] * batch
        self.passes: list[tuple[list[int], list[int]]] = []  # of each pass: tokens a row walked, tokens it kept

    def prefill(self) -> None:
        """The prompt's pass: the first token of each row, and the states of the whole prompt for the draft."""
        ids = self.tokens[:, : self.lengths[0]]
        logits, self.features = self.read(ids, self.prompt_mask, self.position_ids, logits_to_keep=1)
        self.walk(logits, Tree(ids[:, -1:]))
        self.newest = torch.full_like(self.length, ids.shape[1] - 1)  # which of the features is a row's last

    def step(self) -> None:
        """Propose, read, keep: one pass of the target."""
        newest = self.tokens.gather(1, self.length[:, None] - 1)
        # At the very end nothing is left to propose: the pass itself gives the last token.
        depth = min(self.drafting.depth, self.remaining - 1)
        tree = self.propose(newest, depth) if depth else Tree(newest, ancestors=self.block(1))
        self.base, self.bases = self.length[:, None] - 1, [length - 1 for length in self.lengths]
        positions = self.base + self.shift + tree.ancestors.sum(-1) - 1  # the root's and the depth
        logits, features = self.read(tree.ids, self.mask(tree.ancestors, self.target.dtype), positions)
        path, kept = self.walk(logits, tree)
        path = path[:, : max(self.passes[-1][1])]
        self.features, self.newest = features[self.rows, path], (kept - 1).clamp(min=0)
        if self.drafting.top_k > 1:
            in_order = self.base + torch.arange(path.shape[1], device=path.device)
            self.target_cache.move(self.rows, self.base + path, in_order)

    def read(self, ids: Tensor, mask: Tensor | None, positions: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The target over ids [B,w] at the slots from base on -> logits [B,w,V] and captured states [B,w,3H]."""
        output = self.target(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=self.at(self.target_cache, 0, ids.shape[1]),
            use_cache=True,
            output_hidden_states=self.layers,
            **kwargs,
        )
        return output.logits, torch.cat([output.hidden_states[i] for i in self.layers], dim=-1)

    # ---- slots and masks ----

    def at(self, cache: SlotCache, offset: int, width: int) -> SlotCache:
        """The cache, set to write `width` slots of each row from base + offset on."""
        first, last = min(self.bases) + offset, max(self.bases) + offset
        if first == last:
            return cache.at((slice(None), slice(first, first + width)), last + width)
        slots = self.base + offset + torch.arange(width, device=self.base.device)
        return cache.at((self.rows, slots), last + width)

    def block(self, width: int) -> Tensor:
        """Causal [1,w,w]."""
        return torch.ones(1, width, width, dtype=torch.bool, device=self.base.device).tril()

    def mask(self, own: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B,1,w,n]: all slots before base, and from base on those that own [B or 1,w,m] says.

        None when a single query sees every slot.
        """
        _, queries, width = own.shape
        if queries == 1 and self.prompt_mask is None and min(self.bases) == max(self.bases):
            return None
        slots = torch.arange(max(self.bases) + width, device=own.device)
        visible = slots < self.base  # [B,n]
        if self.prompt_mask is not None:
            visible[:, : self.prompt_mask.shape[1]] &= self.prompt_mask.bool()
        visible = visible[:, None].repeat(1, queries, 1)
        index = (self.base + slots[:width])[:, None].expand(-1, queries, -1)
        visible.scatter_(2, index, own.expand(len(index), -1, -1))
        blocked = torch.zeros(visible.shape, dtype=dtype, device=own.device)
        return blocked.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]

    # ---- proposing ----

    def propose(self, newest: Tensor, depth: int) -> Tree:
        """A tree below the newest token [B,1]: the `top_k` likeliest nodes of each level are expanded, and of all
        candidates the best `total_tokens` kept."""
        k, batch, device = self.drafting.top_k, len(newest), newest.device
        state, logits = self.read_context()  # of the b nodes that are expanded: [B,b,H] and [B,b,D]
        self.base, self.bases = self.length[:, None] - 1, [length - 1 for length in self.lengths]
        mass = torch.zeros(batch, 1, device=device)  # [B,b] log-probability of these nodes
        expanded = torch.zeros_like(newest)  # [B,b] their numbers among the candidates, from 1; 0 is the root
        seen = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # [B,b,m] of the m slots of this step so far
        ids, scores, parents, q, owners = [], [], [], [], []
        for level in range(depth):
            drawn, gain, left, log_q = self.draw(logits)
            ids.append(self.draft.to_target_ids(drawn).flatten(1))
            scores.append((mass[..., None] + left).flatten(1))
            parents.append(expanded.repeat_interleave(k, 1))
            q.append(log_q)
            owners.append(expanded)
            if level + 1 == depth:
                break
            mass, best = (mass[..., None] + gain).flatten(1).topk(k)
            expanded, parent = best + sum(x.shape[1] for x in ids[:-1]) + 1, best // k
            itself = torch.eye(k, dtype=torch.bool, device=device).expand(batch, -1, -1)
            seen = torch.cat((seen[self.rows, parent], itself), dim=-1)
            output = self.draft(
                ids[-1].gather(1, best),
                state[self.rows, parent],
                attention_mask=self.mask(seen, self.draft.dtype),
                position_ids=(self.base + self.shift + level).expand(-1, k),
                cache=self.at(self.draft_cache, level * k, k),
                use_cache=True,
            )
            state, logits = output.hidden_states, output.logits
        ids, q = torch.cat(ids, 1), torch.cat(q, 1).exp() if self.sampled else None
        if k == 1:  # a chain: its candidates in their order
            nodes = torch.arange(depth + 1, device=device)
            children = ((nodes + 1) % (depth + 1)).expand(batch, -1)[..., None]
            owner = nodes.clamp(max=depth - 1).expand(batch, -1)
            return Tree(torch.cat((newest, ids), 1), depth, self.block(depth + 1), children, q, owner)
        tree = self.keep_best(newest, depth, ids, torch.cat(scores, 1), torch.cat(parents, 1), torch.cat(owners, 1))
        tree.q = q
        return tree

    def keep_best(
        self, newest: Tensor, depth: int, ids: Tensor, scores: Tensor, parents: Tensor, owners: Tensor
    ) -> Tree:
        """The best `total_tokens` of the candidates [B,M], whose parents are numbers from 1, 0 the root.

        owners [B,E]: the numbers of the expanded ones.
        """
        k, batch, device = self.drafting.top_k, len(ids), ids.device
        # A child never scores above its parent and stands behind it: in a stable order no node loses its parent, and
        # siblings keep theirs.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        chosen = order[:, : self.drafting.total_tokens].sort(-1).values
        nodes = torch.arange(1, chosen.shape[1] + 1, device=device).expand(batch, -1)
        node = ids.new_zeros(batch, ids.shape[1] + 1).scatter_(1, chosen + 1, nodes)  # of a candidate's number
        parents = node.gather(1, parents.gather(1, chosen))
        children = ids.new_zeros(batch, (chosen.shape[1] + 1) * k).scatter_(1, parents * k + chosen % k, nodes)
        up = above = F.pad(parents, (1, 0))  # [B,N], the root's is itself
        ancestors = torch.eye(up.shape[1], dtype=torch.bool, device=device).repeat(batch, 1, 1)
        for _ in range(depth):
            ancestors.scatter_(2, above[..., None], True)
            above = up.gather(1, above)
        owner = torch.zeros_like(node)
        owner.scatter_(1, owners, torch.arange(owners.shape[1], device=device).expand_as(owners))
        owner = owner.gather(1, F.pad(chosen + 1, (1, 0)))
        ids = torch.cat((newest, ids.gather(1, chosen)), 1)
        return Tree(ids, depth, ancestors, children.unflatten(1, (-1, k)), owner=owner)

    def read_context(self) -> tuple[Tensor, Tensor]:
        """The draft over the target's newest states -> at each row's last its own state [B,1,H], logits [B,1,D]."""
        width = self.features.shape[1]
        slots = self.base + torch.arange(width, device=self.base.device)
        mask, positions = self.prompt_mask, self.position_ids
        if self.draft_cache.buffers:
            mask, positions = self.mask(self.block(width), self.draft.dtype), slots + self.shift
        output = self.draft(
            self.tokens.gather(1, slots + 1),  # slot s goes with token s + 1
            self.features,
            attention_mask=mask,
            position_ids=positions,
            cache=self.at(self.draft_cache, 0, width),
            use_cache=True,
            predict_at=self.newest,
        )
        return output.hidden_states, output.logits

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Children from logits [B,b,D]: draft ids, log-probability and score [B,b,k], and the log-distribution."""
        log_q = logits.float() / self.drafting.temperature
        if self.sampled and self.truncating:  # what the target cannot say need not be proposed
            log_q = self.truncating(None, log_q.flatten(0, 1)).view_as(log_q)
        log_q = log_q.log_softmax(-1)
        if not self.sampled:
            gain, drawn = log_q.topk(self.drafting.top_k)
            return drawn, gain, gain, log_q
        noise = torch.empty_like(log_q).exponential_(generator=self.drafting.generator)
        drawn = (log_q - noise.log()).topk(self.drafting.top_k).indices
        gain = log_q.gather(-1, drawn)
        taken = gain.exp().cumsum(-1) - gain.exp()
        return drawn, gain, torch.maximum((1 - taken).clamp(min=0).log(), gain), log_q

    # ---- keeping ----

    def walk(self, logits: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        """Down from the root while a child is what the target says, given its logits [B,N,V].

        Writes the new tokens. Returns the nodes passed [B,depth+1] and how many new tokens each row keeps [B].
        """
        rows = self.rows[:, 0]
        node = count = torch.zeros_like(self.length)
        alive, path, best = self.length < self.goal, [], None
        if not self.sampled and self.prefix_free:
            scores = logits.flatten(0, 1)
            best = (
                (self.processors(None, scores.float()) if self.processors else scores)
                .argmax(-1)
                .view_as(logits[..., 0])
            )
        for level in range(tree.depth + 1):
            kids = tree.children[rows, node] if level < tree.depth else None  # [B,k]
            if best is not None:
                token = best[rows, node]
            else:
                scores = self.process(logits[rows, node].float(), level, alive)
                token = scores.argmax(-1)
            if self.sampled:
                token, child = self.try_children(scores.softmax(-1), tree, node, kids)
            elif kids is not None:
                child = (kids * (tree.ids.gather(1, kids) == token[:, None])).amax(-1)
            self.tokens.scatter_(1, self.length[:, None] + level, token[:, None])
            path.append(node)
            count = count + alive
            if kids is None:
                break
            alive = alive & (child > 0)
            node = torch.where(alive, child, node)
            if best is None and not alive.any():  # processors and sampling cost more than this wait
                path += [node] * (tree.depth - level)
                break
        return torch.stack(path, 1), self.advance(count, tree.depth + 1)

    def process(self, scores: Tensor, level: int, alive: Tensor) -> Tensor:
        """The processors on scores [B,V] for the token after the first length + level of each living row."""
        if self.prefix_free:
            return self.processors(None, scores) if self.processors else scores
        # They read the length off the ids: one call, of all rows, for each length. Its prefixes are confirmed tokens.
        result = scores
        for end in {length + level for length, lives in zip(self.lengths, alive.tolist(), strict=True) if lives}:
            processed = self.processors(self.tokens[:, :end], scores.clone())
            result = torch.where((self.length + level == end)[:, None], processed, result)
        return result

    def try_children(self, p: Tensor, tree: Tree, node: Tensor, kids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Recursive rejection without replacement, p [B,V], kids [B,k] -> token and child, or 0, [B]."""
        child = torch.zeros_like(node)
        if kids is not None:
            q = tree.q[self.rows[:, 0], tree.owner.gather(1, node[:, None])[:, 0]]
            if self.kept_ids is not None:
                q = torch.zeros_like(p).index_copy_(1, self.kept_ids, q)
            chance = torch.rand(kids.shape, generator=self.drafting.generator, device=p.device)
            for i, token in enumerate(tree.ids.gather(1, kids).split(1, dim=1)):
                q_token = q.gather(1, token)
                tried = (kids[:, i, None] > 0) & (child[:, None] == 0) & (q_token > 0)  # [B,1]
                accepted = tried & (chance[:, i, None] * q_token < p.gather(1, token))
                child = torch.where(accepted[:, 0], kids[:, i], child)
                rest = (p - q).clamp_(min=0)
                mass = rest.sum(-1, keepdim=True)
                p = torch.where(tried & ~accepted & (mass > 0), rest / mass, p)
                q = q.scatter(1, token, 0)
                q = q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        token = torch.multinomial(p, 1, generator=self.drafting.generator)
        return torch.where(child[:, None] > 0, tree.ids.gather(1, child[:, None]), token)[:, 0], child

    def advance(self, count: Tensor, width: int) -> Tensor:
        """Take over `count` [B] new tokens, at most `width`, up to where a row's text ends; returns how many [B]."""
        ends = self.length[:, None] + torch.arange(1, width + 1, device=count.device)
        fresh = ends <= (self.length + count)[:, None]
        if self.eos_ids is not None:
            stops = fresh & torch.isin(self.tokens.gather(1, ends - 1), self.eos_ids)
            self.stop_at = torch.minimum(self.stop_at, ends.masked_fill(~stops, self.tokens.shape[1]).amin(-1))
        if self.criteria:
            for end in sorted(set(ends[fresh].tolist())):
                stops = torch.stack([criterion(self.tokens[:, :end], None) for criterion in self.criteria]).any(0)
                stops = stops & (ends == end).logical_and(fresh).any(-1)
                self.stop_at = torch.where(stops, self.stop_at.clamp(max=end), self.stop_at)
        # Without an end-of-sequence token generate() pads nothing: every row goes on until the last one stops.
        self.goal = self.stop_at if self.pads else self.stop_at.max().expand_as(self.stop_at)
        kept = (torch.minimum(self.length + count, self.goal) - self.length).clamp(min=0)
        self.length = self.length + kept
        # The one wait for the device in a step.
        self.lengths, goals, *passed = torch.stack((self.length, self.goal, count, kept)).tolist()
        self.remaining = max(0, *(goal - length for goal, length in zip(goals, self.lengths, strict=True)))
        self.passes.append(tuple(passed))
        return kept

    def acceptance(self) -> dict[str, Any]:
        """The record that SpeculativeOutput describes."""
        passes = self.passes[1:]  # the prompt's is not counted
        rows = [[min(counts[r] - 1, kept[r]) for counts, kept in passes if counts[r]] for r in range(len(self.rows))]
        accepted = [number for row in rows for number in row]
        steps = max(1, len(accepted))
        shares = [sum(number > i for number in accepted) / steps for i in range(self.drafting.depth)]
        tau = sum(sum(kept) for _, kept in passes) / steps
        return {"steps": len(passes), "accepted": rows, "acceptance_per_position": shares, "tau": tau}
