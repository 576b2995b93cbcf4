"""Conversations with the target's own answers: a draft learns best from what its target writes.

    python trainer/regenerate.py --target NAME --prompts conversations.jsonl --output own.jsonl
    python trainer/regenerate.py --target NAME --self_prompts 2000 --output own.jsonl
    python trainer/regenerate.py --base_url http://localhost:8000/v1 --prompts user/name --output own.jsonl

Every answer of the prompts' conversations is written anew by the target, in order, after its own earlier answers. With
--self_prompts it writes the questions too: the chat template up to where the user's words begin, sampled up to the
end-of-turn token. Left out are prompts that do not end, repeat an earlier one or hold no letters; what is kept lies
beside the output, in OUTPUT.prompts.

In process, rows are `input_ids` + `assistant_masks`: the very tokens that the target wrote, marked. An answer that
reaches --max_new_tokens stays without an end. So does one that falls into a loop, as every third greedy answer of
SmolLM2-135M does: it is cut where the same eight tokens in a row come again after --max_repeats repetitions. A server
(vLLM, SGLang, any OpenAI-compatible one) gives text: rows are `messages`, and unfinished answers are left out, because
the chat template would end them where the target did not. `finish_reason` tells how a row's last answer ended:
stop, length, repeats. A conversation ends with its first unfinished answer. `index` is its place in what was read.

The same command goes on where it was stopped; OUTPUT.settings holds what shaped the rows. Sampling is seeded by row.
Rows written together can still differ from rows written alone where two tokens are equal up to rounding.

Shapes: B rows, S sequence, H hidden size, V vocabulary, N layers, G key heads, Q queries for each, D head size.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path

import httpx2
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from tqdm.auto import tqdm
from transformers import AttentionInterface, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eagle3_llama.trainer.conversations import DATE, ROLES, _Dropped, _tidy, tokenize_rows
from eagle3_llama.trainer.frozen_target import end_of_turn_ids, load_target
from eagle3_llama.trainer.hub import provenance
from eagle3_llama.trainer.records import ROWS, load_rows

REPEATED = 8  # tokens in a row that make a repetition
MARK = "@words@"  # where the user's words would begin
TRIES, BACKOFF = 7, 1.0  # of a request; seconds before the second try, doubled before each further one
SHAPING = (
    "target target_gguf_file target_adapter dtype prompts split skip_malformed self max_turns max_new_tokens "
    "max_repeats max_length max_prompt_tokens temperature prompt_temperature top_p seed keep_unfinished server"
).split()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Replace the answers of conversations by the target's own.")
    parser.add_argument("--target", help="Hub name or folder; the model's name with --base_url (default: its first)")
    parser.add_argument("--target_gguf_file", help="GGUF file in that folder")
    parser.add_argument("--target_adapter", help="PEFT adapter (Hub name or folder) that is merged into it")
    parser.add_argument("--dtype", default="bfloat16", help="of the target (default bfloat16)")
    parser.add_argument("--base_url", help="OpenAI-compatible server, up to /v1; OPENAI_API_KEY is its key")
    parser.add_argument("--prompts", nargs="+", help="conversations: files, folders or Hub data sets, as for training")
    parser.add_argument("--split", default="train", help="of Hub data sets (default train)")
    parser.add_argument("--skip_malformed", action="store_true", help="go on with the good records, count the bad")
    parser.add_argument("--self_prompts", type=int, help="the target writes this many prompts itself")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file; rows are added to it as they come")
    parser.add_argument("--limit", type=int, help="only the first conversations")
    parser.add_argument("--max_turns", type=int, help="answers of a conversation (default all)")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="of an answer (default 256)")
    parser.add_argument("--max_repeats", type=int, default=3, help="in process; 0: any number (default 3)")
    parser.add_argument("--max_length", type=int, default=2048, help="tokens of a row, in process (default 2048)")
    parser.add_argument("--max_prompt_tokens", type=int, default=64, help="of a prompt of its own (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers; 0 is greedy (default)")
    parser.add_argument("--prompt_temperature", type=float, default=1.0, help="of prompts of its own (default 1)")
    parser.add_argument("--top_p", type=float, default=0.95, help="of all that is sampled (default 0.95)")
    parser.add_argument("--batch_size", type=int, default=64, help="rows at a time, in process (default 64)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time, by a server (default 16)")
    parser.add_argument("--keep_unfinished", action="store_true", help="keep a server's unfinished answers")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raises: ValueError: options that do not fit one another."""
    if bool(args.prompts) == bool(args.self_prompts):
        raise ValueError("give either --prompts, conversations to answer, or --self_prompts, how many to invent")
    if args.target is None and (args.self_prompts or not args.base_url):
        raise ValueError("--target is missing: the model's Hub name or folder")
    if args.output.suffix != ".jsonl":
        raise ValueError(f"--output {args.output} must end in .jsonl: rows are added line by line")
    for name in "self_prompts limit max_turns max_new_tokens max_prompt_tokens batch_size concurrency".split():
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1")
    if args.temperature < 0 or args.prompt_temperature <= 0 or not 0 < args.top_p <= 1:
        raise ValueError("--temperature must be 0 or more, --prompt_temperature above 0, --top_p above 0, at most 1")


# ---- writing in process


@dataclass
class Row:
    """A conversation that is being written: its tokens so far, 1 in `mask` where they are the target's."""

    index: int
    ids: list[int]
    mask: list[int]
    random: random.Random
    new: int = 0  # tokens of the present answer
    repeats: Counter = field(default_factory=Counter)  # its runs of REPEATED tokens

    def begin(self) -> None:
        self.new, self.repeats = 0, Counter()

    def add(self, token: int) -> int:
        """Add a token to the answer -> how often its last REPEATED tokens have come before."""
        self.append([token], 1)
        self.new += 1
        last = tuple(self.ids[-REPEATED:])
        self.repeats[last] += self.new >= REPEATED
        return self.repeats[last] - 1

    def append(self, ids: list[int], by_target: int) -> None:
        self.ids += ids
        self.mask += [by_target] * len(ids)


class Slots:
    """Keys and values of B rows, each at its own length: when a row ends, another one takes its place.

    `generate` copies the cache at every step, repeats it for every query head and goes on with rows that have ended.
    SmolLM2-135M in bfloat16, one core, 64 rows, sampled prompts of 64 tokens: 197 tokens/s instead of 95.
    """

    def __init__(self, target: PreTrainedModel, batch_size: int):
        config = target.config
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, config.num_hidden_layers, batch_size, config.num_key_value_heads, 0, head_size)
        self.states = torch.zeros(shape, dtype=target.dtype, device=target.device)  # [2,N,B,G,S,D]
        self.target, self.rows, self.positions, self.allowed = target, slice(0), None, None

    def prefill(self, rows: list[Row], first: int) -> Tensor:
        """The rows' tokens into the places from `first` on -> states after their last tokens [B,H]."""
        lengths = [len(row.ids) for row in rows]
        self.reserve(max(lengths))
        self.rows, self.positions = slice(first, first + len(rows)), None
        ids = [row.ids + [0] * (max(lengths) - len(row.ids)) for row in rows]
        if all(row == ids[0] for row in ids):  # prompts of its own all begin alike
            return self.run(ids[:1], None)[:, -1].expand(len(rows), -1)
        return self.run(ids, None)[torch.arange(len(rows)), torch.tensor(lengths) - 1]

    def step(self, rows: list[Row]) -> Tensor:
        """The last tokens of the rows, which have the first places -> states after them [B,H]."""
        positions = [len(row.ids) - 1 for row in rows]
        self.reserve(max(positions) + 1)
        self.rows, self.positions = slice(len(rows)), torch.tensor(positions, device=self.target.device)
        slots = torch.arange(max(positions) + 1, device=self.target.device)
        self.allowed = (slots <= self.positions[:, None])[:, None, None]  # [B,1,1,S]
        return self.run([row.ids[-1:] for row in rows], self.positions[:, None])[:, 0]

    def run(self, ids: list[list[int]], positions: Tensor | None) -> Tensor:
        ids = torch.tensor(ids, device=self.target.device)
        body = self.target.get_decoder()
        return body(input_ids=ids, position_ids=positions, use_cache=False, slots=self).last_hidden_state

    def reserve(self, length: int) -> None:
        have = self.states.shape[4]
        if length > have:
            self.states = pad(self.states, (0, 0, 0, -(-length // 128) * 128 - have))

    def move(self, source: int, place: int, length: int) -> None:
        self.states[:, :, place, :, :length] = self.states[:, :, source, :, :length]


def attend(module, query, key, value, attention_mask, scaling, slots: Slots, **_) -> tuple[Tensor, None]:
    """Writes K and V [B,G,S,D] to their slots and attends to what their rows hold; query [B,GQ,S,D] -> [B,S,GQ,D]."""
    keys, values = slots.states[:, module.layer_idx, slots.rows]
    if slots.positions is None:
        keys[:, :, : key.shape[2]], values[:, :, : key.shape[2]] = key, value
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    rows, used = torch.arange(len(key), device=key.device), slots.allowed.shape[-1]
    keys[rows, :, slots.positions], values[rows, :, slots.positions] = key[:, :, 0], value[:, :, 0]
    # The queries of a key head as if they followed one another: K and V are not copied for each of them.
    query = query.view(len(key), key.shape[1], -1, key.shape[3])
    output = scaled_dot_product_attention(
        query, keys[:, :, :used], values[:, :, :used], attn_mask=slots.allowed, scale=scaling
    )
    return output.reshape(len(key), 1, -1, key.shape[3]), None


AttentionInterface.register("slots", attend)


def pick(logits: Tensor, rows: list[Row], temperature: float, top_p: float) -> list[int]:
    """The next token of each row from logits [B,V]: the best one at temperature 0, else drawn from the nucleus."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    probs = (logits.float() / temperature).softmax(-1)
    cumulative, tokens = probs.cumsum(-1), torch.zeros(len(rows), dtype=torch.long, device=logits.device)
    left = torch.arange(len(rows), device=logits.device)
    while len(left):  # a token is in the nucleus when those above it have less than top_p: V needs no sorting
        draws = torch.tensor([[rows[i].random.random()] for i in left.tolist()], device=logits.device)
        drawn = torch.searchsorted(cumulative[left], draws * cumulative[left, -1:]).clamp(max=logits.shape[1] - 1)
        tokens[left] = drawn[:, 0]
        rest = probs[left]
        left = left[(rest * (rest > rest.gather(1, drawn))).sum(-1) >= top_p]
    return tokens.tolist()


@torch.no_grad()
def write(
    target: PreTrainedModel,
    more: Callable[[], Row | None],
    batch_size: int,
    max_new_tokens: int,
    max_repeats: int,
    temperature: float,
    top_p: float,
) -> Iterator[Row]:
    """Appends an answer to every row that `more` gives, and yields the row when its answer has ended or is full.

    The target must have been loaded with attn_implementation="slots".
    """
    stop, slots, active = set(end_of_turn_ids(target)), Slots(target, batch_size), []
    while True:
        fresh, free = [], batch_size - len(active)
        if free >= batch_size // 8 or not active:  # prompts are read in groups: one by one is slow
            while len(fresh) < free and (row := more()) is not None:
                row.begin()
                fresh.append(row)
        if not fresh and not active:
            return
        hidden = slots.prefill(fresh, len(active)) if fresh else slots.step(active)
        tokens = pick(target.lm_head(hidden), fresh or active, temperature, top_p)
        active += fresh
        for place, token in reversed(list(enumerate(tokens, len(active) - len(tokens)))):
            row = active[place]
            in_a_loop = row.add(token) >= max_repeats > 0
            if token in stop or in_a_loop or row.new == max_new_tokens:
                last = active.pop()
                if last is not row:
                    slots.move(len(active), place, len(last.ids))
                    active[place] = last
                yield row


def in_order(rows: Iterator[Row], given: deque[int]) -> Iterator[Row]:
    """The rows in the order in which their indices were given, in whatever order they end."""
    waiting = {}
    for row in rows:
        waiting[row.index] = row
        while given and given[0] in waiting:
            yield waiting.pop(given.popleft())


def conversations(dataset: Dataset, start: int, args: argparse.Namespace) -> Iterator[tuple[int, list[list[int]]]]:
    """Index and, for each answer, the tokens since the one before; from row `start` on, those that fit."""
    for index in range(start, len(dataset)):
        row = dataset[index]
        pairs = zip(row["assistant_masks"], row["input_ids"], strict=True)
        runs = [(mask, [token for _, token in run]) for mask, run in groupby(pairs, key=lambda pair: pair[0])]
        between = [ids for (_, ids), (by_target, _) in pairwise(runs) if by_target]
        if not runs[0][0] and len(between[0]) + args.max_new_tokens <= args.max_length:
            yield index, between[: args.max_turns]


def answer(target: PreTrainedModel, dataset: Dataset, start: int, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of `tokenize_rows` from `start` on, every supervised run replaced by the target's own answer."""
    fresh, again, given, left = conversations(dataset, start, args), deque(), deque(), {}
    stop = set(end_of_turn_ids(target))

    def more() -> Row | None:
        if again:
            return again.popleft()
        index, between = next(fresh, (None, None))
        if index is None:
            return None
        given.append(index)
        left[index] = between[1:]
        return Row(index, between[0], [0] * len(between[0]), random.Random(f"{args.seed} answer {index}"))

    def complete() -> Iterator[Row]:
        sampling = {"temperature": args.temperature, "top_p": args.top_p}
        for row in write(target, more, args.batch_size, args.max_new_tokens, args.max_repeats, **sampling):
            following = left[row.index]
            fits = following and len(row.ids) + len(following[0]) + args.max_new_tokens <= args.max_length
            if fits and row.ids[-1] in stop:
                row.append(following.pop(0), 0)
                again.append(row)
            else:
                del left[row.index]
                yield row

    return in_order(complete(), given)


# ---- prompts of its own


class Prompts:
    """The kept prompts, in a file that grows."""

    def __init__(self, path: Path):
        self.path, self.kept = path, [json.loads(line) for line in cut_tail(path)]
        self.seen = {alike(row["messages"][0]["content"]) for row in self.kept}
        self.next = self.kept[-1]["candidate"] + 1 if self.kept else 0

    def offer(self, candidate: int, text: str) -> bool:
        """Keep a candidate, unless it is broken, holds no letters outside of markup, or was there before."""
        self.next = candidate + 1
        if "\ufffd" in text or not re.sub(r"<[^>]*>|[\W\d_]", "", text) or alike(text) in self.seen:
            return False
        self.seen.add(alike(text))
        self.kept.append({"candidate": candidate, "messages": [{"role": "user", "content": text.strip()}]})
        with self.path.open("a", encoding="utf-8") as file:
            add_row(file, self.kept[-1])
        return True


def alike(text: str) -> str:
    """What makes two prompts the same."""
    return " ".join(text.casefold().split())


def prompt_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The chat template's tokens up to where the user's words begin."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False, date_string=DATE)
    return tokenizer(text.split(MARK)[0], add_special_tokens=False)["input_ids"]


def invent(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, args) -> None:
    """Sample user turns until there are --self_prompts good ones, in the order of their seeds."""
    prefix, numbers, given = prompt_prefix(tokenizer), candidates(prompts, args), deque()
    stop, special = set(end_of_turn_ids(target)), set(tokenizer.all_special_ids)

    def more() -> Row | None:
        if (index := next(numbers, None)) is None:
            return None
        given.append(index)
        return Row(index, list(prefix), [0] * len(prefix), random.Random(f"{args.seed} prompt {index}"))

    rows = write(target, more, args.batch_size, args.max_prompt_tokens, 0, args.prompt_temperature, args.top_p)
    with tqdm(total=args.self_prompts, initial=len(prompts.kept), desc="Prompts") as bar:
        for row in in_order(rows, given):
            *ids, last = row.ids[len(prefix) :]
            bar.update(last in stop and not special & set(ids) and prompts.offer(row.index, tokenizer.decode(ids)))
            if len(prompts.kept) >= args.self_prompts:
                return
    raise too_few(prompts)


def candidates(prompts: Prompts, args: argparse.Namespace) -> Iterator[int]:
    """Numbers of the candidates to come: a target of which one in 50 is good will not do."""
    return iter(range(prompts.next, prompts.next + 50 * (args.self_prompts - len(prompts.kept)) + 200))


def too_few(prompts: Prompts) -> ValueError:
    return ValueError(
        f"only {len(prompts.kept)} of {prompts.next} candidates are good prompts: raise --max_prompt_tokens or change "
        "--prompt_temperature, or give --prompts"
    )


# ---- writing by a server


async def post(client: httpx2.AsyncClient, gate: asyncio.Semaphore, path: str, body: dict) -> dict:
    """The first of the server's choices. Tries again when it is lost, busy (429) or broken (5xx).

    Raises:
        ValueError: it refuses the request, or TRIES tries were in vain; with what it says.
    """
    for attempt in range(TRIES):
        try:
            async with gate:
                response = await client.post(path, json=body)
            if response.is_success and (choices := response.json().get("choices")):
                return choices[0]
            reason = f"status {response.status_code}: {response.text[:500]}"
            if response.status_code != 429 and response.status_code < 500:
                raise ValueError(f"{client.base_url}{path} refuses: {reason}")
        except httpx2.TransportError as error:
            reason = f"{type(error).__name__} {error}"
        if attempt + 1 < TRIES:
            await asyncio.sleep(BACKOFF * 2**attempt)
    raise ValueError(f"{client.base_url}{path} failed {TRIES} times ({reason}); the same command goes on")


async def in_turn(coroutines: Iterator[Coroutine], width: int) -> AsyncIterator:
    """The results in order, while `width` of them are under way."""
    tasks = deque()
    try:
        for coroutine in coroutines:
            tasks.append(asyncio.create_task(coroutine))
            if len(tasks) == width:
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def converse(client, gate, index: int, messages: list[dict], args) -> tuple[dict | None, str | None]:
    """The conversation with the server's answers, and why it is cut short or left out."""
    try:
        messages = _tidy(messages or [])
    except _Dropped as dropped:
        return None, f"left out: {dropped}"
    history, kept, answers, finish = [], 0, 0, None
    body = {"model": args.target, "max_tokens": args.max_new_tokens, "temperature": args.temperature}
    if args.temperature:
        body |= {"top_p": args.top_p, "seed": args.seed + index}
    for message in messages:
        if message["role"] != "assistant":
            history.append(message)
            continue
        if answers == args.max_turns or finish not in (None, "stop"):
            break
        choice = await post(client, gate, "chat/completions", body | {"messages": history})
        content = choice["message"].get("content") or ""
        if not content.strip() or choice["finish_reason"] != "stop" and not args.keep_unfinished:
            why = "unfinished answer" if content.strip() else "empty answer"
            return row_of(index, finish, history[:kept]), f"{'cut short' if kept else 'left out'}: {why}"
        history.append({"role": "assistant", "content": content})
        kept, answers, finish = len(history), answers + 1, choice["finish_reason"]
    return row_of(index, finish, history[:kept]), None


def row_of(index: int, finish: str | None, messages: list[dict]) -> dict | None:
    return {"index": index, "finish_reason": finish, "messages": messages} if messages else None


async def invent_by_server(client, gate, tokenizer, prompts: Prompts, args: argparse.Namespace) -> None:
    """As `invent`, by /completions after the chat template's prefix."""
    prefix = prompt_prefix(tokenizer)

    async def candidate(index: int) -> tuple[int, dict]:
        sampling = {"temperature": args.prompt_temperature, "top_p": args.top_p, "seed": args.seed + index}
        body = {"model": args.target, "prompt": prefix, "max_tokens": args.max_prompt_tokens, **sampling}
        return index, await post(client, gate, "completions", body)

    asked, width = (candidate(index) for index in candidates(prompts, args)), 2 * args.concurrency
    bar = tqdm(total=args.self_prompts, initial=len(prompts.kept), desc="Prompts")
    async with aclosing(in_turn(asked, width)) as drawn:
        with bar:
            async for index, choice in drawn:
                bar.update(choice["finish_reason"] == "stop" and prompts.offer(index, choice["text"]))
                if len(prompts.kept) >= args.self_prompts:
                    return
    raise too_few(prompts)


async def serve(args: argparse.Namespace, start: int) -> None:
    """Everything by the server at --base_url."""
    gate, limits = asyncio.Semaphore(args.concurrency), httpx2.Limits(max_connections=args.concurrency)
    options = {"headers": headers(), "timeout": httpx2.Timeout(600, connect=10), "limits": limits}
    async with httpx2.AsyncClient(base_url=args.base_url, **options) as client:
        if args.self_prompts:
            prompts = Prompts(beside(args.output, "prompts"))
            if len(prompts.kept) < args.self_prompts:
                await invent_by_server(client, gate, load_tokenizer(args), prompts, args)
        rows = read_rows(args)
        asked = (converse(client, gate, i, rows[i]["messages"], args) for i in range(start, len(rows)))
        missing, bar = Counter(), tqdm(total=len(rows), initial=start, desc="Answers")
        with args.output.open("a", encoding="utf-8") as file, bar:
            async for row, why in in_turn(asked, 4 * args.concurrency):
                missing[why] += why is not None
                if row is not None:
                    add_row(file, row)
                bar.update()
    report(args, missing)


def headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def model_name(base_url: str) -> str:
    """The first model of the server."""
    try:
        response = httpx2.get(f"{base_url.rstrip('/')}/models", headers=headers())
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx2.HTTPError, LookupError, ValueError) as error:
        raise ValueError(f"{base_url}/models names no model ({error}): start it, or give --target") from None


# ---- files


def beside(output: Path, name: str) -> Path:
    """OUTPUT.name: no .jsonl, so that a folder of rows holds nothing else."""
    return output.with_name(f"{output.name}.{name}")


def cut_tail(path: Path) -> list[str]:
    """The complete lines of a file; what an interruption left of another one is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return data[:whole].decode().split("\n")[:-1]


def add_row(file, row: dict) -> None:
    file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    file.flush()


def begin(args: argparse.Namespace) -> int:
    """The first row that is not in the output yet.

    Raises:
        ValueError: the output was written with other settings.
    """
    settings = {name: value for name, value in vars(args).items() if name in SHAPING}
    settings |= {name: without_folder(settings[name]) for name in ("target", "target_adapter")}
    settings["prompts"] = [without_folder(name) for name in args.prompts or []]
    settings |= {"self": bool(args.self_prompts), "server": bool(args.base_url)}
    path, lines = beside(args.output, "settings"), cut_tail(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or not lines and not cut_tail(beside(args.output, "prompts")):
        path.write_text(json.dumps({"settings": settings, **provenance()}, indent=1))
    before = json.loads(path.read_text())["settings"]
    if changed := [name for name in settings if before.get(name) != settings[name]]:
        changes = ", ".join(f"{name}: {before.get(name)} -> {settings[name]}" for name in changed)
        raise ValueError(f"{args.output} was begun with other settings ({changes}): take another --output")
    return json.loads(lines[-1])["index"] + 1 if lines else 0


def without_folder(name: str | None) -> str | None:
    """Names of folders here mean nothing elsewhere."""
    return Path(name).name if name and os.path.exists(name) else name


def read_rows(args: argparse.Namespace) -> Dataset:
    """The conversations to answer, those that end with a question with an answer to replace."""
    if args.self_prompts:
        kept = Prompts(beside(args.output, "prompts")).kept[: args.self_prompts]
        rows = Dataset.from_list([dict.fromkeys(ROWS) | {"messages": row["messages"]} for row in kept], features=ROWS)
    else:
        rows, _ = load_rows(args.prompts, split=args.split, skip_malformed=args.skip_malformed, seed=args.seed)
    rows = rows.select(range(min(len(rows), args.limit or len(rows))))
    return rows.map(with_last_answer, features=ROWS, load_from_cache_file=False, desc="Reading")


def with_last_answer(row: dict) -> dict:
    """A question without an answer gets itself as one: words that the tokenizer knows, to be replaced."""
    messages = row["messages"]
    if messages and ROLES.get(messages[-1]["role"].lower()) == "user":
        messages = [*messages, {"role": "assistant", "content": messages[-1]["content"]}]
    return {**row, "messages": messages}


def load_tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerBase:
    options = {"gguf_file": args.target_gguf_file} if args.target_gguf_file else {}
    return AutoTokenizer.from_pretrained(args.target, **options)


def report(args: argparse.Namespace, missing: Counter) -> None:
    """What the output holds, and what is missing from what was read."""
    rows = tokens = unfinished = 0
    with args.output.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            rows, unfinished = rows + 1, unfinished + (row["finish_reason"] != "stop")
            tokens += sum(row.get("assistant_masks", []))
    reasons = "".join(f", {number} {why}" for why, number in missing.most_common() if number)
    own = f", {tokens} tokens of the target's own" if tokens else ""
    print(f"{args.output}: {rows} conversations{own}, {unfinished} with an unfinished answer{reasons}")


def run_in_process(args: argparse.Namespace, start: int) -> None:
    tokenizer = load_tokenizer(args)
    print("loading the target", flush=True)
    files = {"gguf_file": args.target_gguf_file, "adapter": args.target_adapter}
    target = load_target(args.target, **files, dtype=args.dtype, attn_implementation="slots")
    if torch.cuda.is_available():
        target = target.cuda()
    if not end_of_turn_ids(target):
        raise ValueError(f"{args.target} has no eos_token_id in its generation config: its answers would not end")
    if args.self_prompts:
        prompts = Prompts(beside(args.output, "prompts"))
        if len(prompts.kept) < args.self_prompts:
            invent(target, tokenizer, prompts, args)
    dataset, dropped = tokenize_rows(read_rows(args), tokenizer, args.max_length)
    missing = Counter({f"left out: {reason}": number for reason, number in dropped.items()})
    stop, bar, following = set(end_of_turn_ids(target)), tqdm(total=len(dataset), initial=start, desc="Answers"), start
    with args.output.open("a", encoding="utf-8") as file, bar:
        for row in answer(target, dataset, start, args):
            finish = "stop" if row.ids[-1] in stop else "length" if row.new == args.max_new_tokens else "repeats"
            record = {"index": row.index, "finish_reason": finish, "input_ids": row.ids, "assistant_masks": row.mask}
            add_row(file, record | {"text": tokenizer.decode(row.ids)})
            missing["left out: no room for an answer"] += row.index - following
            bar.update(row.index + 1 - following)
            following = row.index + 1
    missing["left out: no room for an answer"] += len(dataset) - following
    report(args, missing)


def main() -> None:
    args = parse_arguments()
    if args.base_url:
        args.target = args.target or model_name(args.base_url)
        asyncio.run(serve(args, begin(args)))
    else:
        run_in_process(args, begin(args))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)
