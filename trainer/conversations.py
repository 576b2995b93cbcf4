"""From conversations to token ids and assistant masks.

    dataset, dropped = tokenize_rows(rows, tokenizer, max_length=2048)
    print(format_preview(dataset, tokenizer, 3))

A token is supervised when the target itself would generate it: the answer and its end-of-turn token, nothing that the
chat template writes around.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import jinja2
import numpy as np
from datasets import Dataset, Features, Value
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from eagle3_llama.trainer.records import TOKENS, batch_rows

ROLES = {"system": "system", "user": "user", "human": "user", "prompter": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant")
# Llama-3.2's template writes today's date unless it is given one: a command resumed tomorrow would see other tokens.
DATE = "26 Jul 2024"


class _Dropped(Exception):
    """A row that cannot be trained on; the message is the reason under which it is counted."""


@dataclass
class _Text:
    text: str
    answers: Iterable[tuple[int, int]]  # characters, each up to the end of what the template adds to the answer
    prefix: list[int]  # ids before the text


def tokenize_rows(
    rows: Dataset, tokenizer: PreTrainedTokenizerFast, max_length: int, num_proc: int | None = None
) -> tuple[Dataset, Counter]:
    """Turns the rows of `load_rows` into `input_ids` and `assistant_masks`, and counts the dropped rows by reason.

    Rows are cut at `max_length` tokens. The mask comes from the template's `{% generation %}` where it has one.
    If not, an answer is what the rendering gains over its prompt's rendering with the generation header; a row counts
    only if all these renderings are prefixes of one another and no token lies across an answer's start.

    Raises:
        ValueError: Conversations and no chat template, a tokenizer that is not a fast one, no row left.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets: load a fast tokenizer.")
    # A copy without truncation and padding of its own, and without the post-processor that may trim the offsets.
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.post_processor = None
    encoder.no_padding()
    encoder.enable_truncation(max_length)
    # No cache: datasets' fingerprints do not see that imported code has changed, and a stale mask trains in silence.
    tokenized = rows.map(
        _tokenize_batch,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "encoder": encoder, "max_length": max_length},
        remove_columns=rows.column_names,
        features=Features({**TOKENS, "dropped": Value("string")}),
        num_proc=num_proc,
        load_from_cache_file=False,
        desc="Tokenizing",
    )
    reasons = tokenized["dropped"][:]
    dropped = Counter(reason for reason in reasons if reason is not None)
    if dropped.total() == len(rows):
        raise ValueError(
            f"No row with a supervised token is left ({', '.join(f'{n} {why}' for why, n in dropped.most_common())}; "
            f"max_length {max_length}). Mask not verified, template refused: give it a chat template that "
            "marks the answers with {% generation %}. Nothing supervised: raise --max_length. Else check the data."
        )
    kept = [i for i, reason in enumerate(reasons) if reason is None]
    return tokenized.remove_columns("dropped").select(kept), dropped


def _tokenize_batch(batch: dict, tokenizer: PreTrainedTokenizerFast, encoder: Tokenizer, max_length: int) -> dict:
    specials = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    prepared = [_prepare(row, tokenizer) for row in batch_rows(batch)]
    texts = [row.text for row in prepared if isinstance(row, _Text)]
    encodings = iter(encoder.encode_batch(texts, add_special_tokens=False))
    out = {"input_ids": [], "assistant_masks": [], "dropped": []}
    for row in prepared:
        try:
            ids, mask, reason = *_tokens_and_mask(row, encodings, specials, max_length), None
        except _Dropped as dropped:
            ids, mask, reason = [], [], str(dropped)
        out["input_ids"].append(ids)
        out["assistant_masks"].append(mask)
        out["dropped"].append(reason)
    return out


def _prepare(row: dict, tokenizer: PreTrainedTokenizerFast) -> _Text | tuple[list[int], list[int]] | _Dropped:
    """A text to tokenize, or tokens with their mask, or why the row is dropped."""
    try:
        if row["input_ids"] is not None:
            return _check_tokens(row["input_ids"], row["assistant_masks"], tokenizer)
        if row["prompt"] is not None:
            return _join(row["prompt"], row["completion"], tokenizer)
        return _render(_tidy(row["messages"]), tokenizer)
    except _Dropped as dropped:
        return dropped


def _check_tokens(ids: list[int], mask: list[int], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    if not ids:
        raise _Dropped("empty")
    if min(ids) < 0 or max(ids) >= len(tokenizer):
        raise _Dropped("token outside the vocabulary")
    return ids, mask


def _join(prompt: str, completion: str, tokenizer: PreTrainedTokenizerFast) -> _Text:
    if not prompt.strip() or not completion.strip():
        raise _Dropped("empty")
    if tokenizer.eos_token is None:
        raise ValueError("The tokenizer has no eos_token to end a completion with: set tokenizer.eos_token.")
    if not completion.endswith(tokenizer.eos_token):
        completion += tokenizer.eos_token
    bos = tokenizer.bos_token_id
    add_bos = (
        bos is not None and tokenizer("")["input_ids"][:1] == [bos] and not prompt.startswith(tokenizer.bos_token)
    )
    return _Text(prompt + completion, [(len(prompt), len(prompt + completion))], [bos] if add_bos else [])


def _tidy(messages: list[dict]) -> list[dict]:
    """The system message, then everything from the first user turn to the last assistant turn."""
    if not messages:
        raise _Dropped("empty")
    if any(message["role"].lower() not in ROLES for message in messages):
        raise _Dropped("unknown speaker")
    messages = [{"role": ROLES[message["role"].lower()], "content": message["content"]} for message in messages]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise _Dropped("no user turn")
    first = roles.index("user")
    if "assistant" not in roles[first:]:
        raise _Dropped("no assistant turn")
    last = len(roles) - 1 - roles[::-1].index("assistant")
    messages = [message for message in messages[:first] if message["role"] == "system"] + messages[first : last + 1]
    if not all(message["content"] and message["content"].strip() for message in messages):
        raise _Dropped("empty")
    return messages


def _render(messages: list[dict], tokenizer: PreTrainedTokenizerFast) -> _Text | tuple[list[int], list[int]]:
    if tokenizer.chat_template is None:
        raise ValueError(
            "The rows are conversations and the tokenizer has no chat template: use the instruct model's tokenizer, "
            "or set tokenizer.chat_template."
        )
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()):
        row = _apply(tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        if not any(row["assistant_masks"]):
            raise _Dropped("mask not verified")
        return row["input_ids"], row["assistant_masks"]
    text = _apply(tokenizer, messages, tokenize=False)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    # Lazily: rendering the prompts is slow, and those beyond max_length are never asked for.
    return _Text(text, (_find_answer(text, messages, turn, tokenizer) for turn in turns), [])


def _apply(tokenizer: PreTrainedTokenizerFast, messages: list[dict], **options):
    try:
        return tokenizer.apply_chat_template(messages, date_string=DATE, **options)
    except jinja2.TemplateError:
        raise _Dropped("template refused") from None


def _find_answer(text: str, messages: list[dict], turn: int, tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    prompt = _apply(tokenizer, messages[:turn], tokenize=False, add_generation_prompt=True)
    answered = _apply(tokenizer, messages[: turn + 1], tokenize=False)
    prefixes = text.startswith(answered) and answered.startswith(prompt)
    if not prefixes or not answered[len(prompt) :].lstrip().startswith(messages[turn]["content"].strip()):
        raise _Dropped("mask not verified")
    return len(prompt), len(answered)


def _tokens_and_mask(
    row: _Text | tuple[list[int], list[int]] | _Dropped,
    encodings: Iterator[Encoding],
    specials: list[int],
    max_length: int,
) -> tuple[list[int], list[int]]:
    if isinstance(row, _Dropped):
        raise row
    ids, mask = _mask_answers(row, next(encodings), specials) if isinstance(row, _Text) else row
    # Two in a row: a token is learned from the one before it, which must be the assistant's too.
    if not any(a and b for a, b in pairwise(mask[1:max_length])):
        raise _Dropped("nothing supervised within max_length")
    return ids[:max_length], mask[:max_length]


def _mask_answers(row: _Text, encoding: Encoding, specials: list[int]) -> tuple[list[int], list[int]]:
    """Supervises each answer from its first token to its end-of-turn token, which must be its only special token."""
    special, mask = np.isin(encoding.ids, specials), np.zeros(len(encoding.ids), dtype=np.int8)
    starts, ends = np.array(encoding.offsets).reshape(-1, 2).T
    for start, end in row.answers:
        first = np.searchsorted(starts, start)
        if first == len(starts):
            break  # beyond max_length
        stops = first + np.flatnonzero(special[first : np.searchsorted(starts, end)])
        begins_here = starts[first] == start and (first == 0 or ends[first - 1] == start)
        cut_off = ends[-1] < end and len(stops) == 0
        if not begins_here or not (cut_off or len(stops) == 1 and not row.text[ends[stops[0]] : end].strip()):
            raise _Dropped("mask not verified")
        mask[first : len(mask) if cut_off else stops[0] + 1] = 1
    return row.prefix + encoding.ids, [0] * len(row.prefix) + mask.tolist()


def format_preview(dataset: Dataset, tokenizer: PreTrainedTokenizerFast, n: int, colour: bool = False) -> str:
    """The first `n` tokenized rows as text, what is supervised in ⟦brackets⟧ and, if asked, in green."""
    left, right = ("\033[32m⟦", "⟧\033[0m") if colour else ("⟦", "⟧")
    blocks = []
    for i, row in enumerate(dataset.select(range(min(n, len(dataset))))):
        ids, mask = row["input_ids"], row["assistant_masks"]
        text = ""
        for supervised, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
            piece = tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False)
            text += left + piece + right if supervised else piece
        blocks.append(f"--- row {i}: {len(ids)} tokens, {sum(mask) / len(ids):.0%} supervised\n{text}")
    return "\n".join(blocks)


def held_out_prompts(dataset: Dataset, n: int, max_prompt_length: int) -> list[list[int]]:
    """The first `n` different prompts: the tokens before a row's first supervised one, generation header included."""
    prompts = {}
    for row in dataset:
        prompt = tuple(row["input_ids"][: row["assistant_masks"].index(1)])
        if 0 < len(prompt) <= max_prompt_length:
            prompts[prompt] = None
        if len(prompts) == n:
            break
    return [list(prompt) for prompt in prompts]
