"""From conversations to token ids and assistant masks.

    rows, report = load_rows(["sharegpt.json", "user/name"], skip_malformed=True)
    dataset, dropped = tokenize_rows(rows, tokenizer, max_length=2048)
    print(format_preview(dataset, tokenizer, 3))

Accepted rows: `messages` (role, content), ShareGPT `conversations` (from, value), `prompt` + `completion` (two
strings, or two lists of messages), and `input_ids` + `assistant_masks` or `labels`. A token is supervised when the
target itself would generate it: the answer and its end-of-turn token, nothing that the chat template writes around.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import ijson
import jinja2
import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_dataset
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SUFFIXES = (".json", ".jsonl", ".parquet")
ACCEPTED = "messages | conversations | prompt + completion | input_ids + assistant_masks | input_ids + labels"
TOKENS = {"input_ids": List(Value("int32")), "assistant_masks": List(Value("int8"))}
MESSAGES = List({"role": Value("string"), "content": Value("string")})
ROWS = Features({"messages": MESSAGES, "prompt": Value("string"), "completion": Value("string"), **TOKENS})
ROLES = {"system": "system", "user": "user", "human": "user", "prompter": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant")
# Llama-3.2's template writes today's date unless it is given one: a command resumed tomorrow would see other tokens.
DATE = "26 Jul 2024"


@dataclass(frozen=True)
class LoadReport:
    """How many rows `load_rows` returned, and how many malformed records it left out of what it read."""

    rows: int
    malformed: int


def load_rows(
    sources: list[str],
    *,
    split: str = "train",
    weights: list[float] | None = None,
    skip_malformed: bool = False,
    max_samples: int | None = None,
    seed: int = 42,
) -> tuple[Dataset, LoadReport]:
    """Reads and mixes local .json, .jsonl, .parquet files, folders of them, and Hub names ("user/name[:config]").

    `split` is the Hub datasets' split. `weights` are the sources' shares of the mixture, which ends where the first
    source is used up; without them every row is taken. Mixtures are shuffled. `max_samples` rows are drawn at random.

    Raises:
        ValueError: A source that does not exist or holds no rows, a broken record or one of no accepted schema (unless
            `skip_malformed`), weights that do not fit the sources, `max_samples` below 1.
    """
    if not sources:
        raise ValueError("No data source given: name a local file or folder, or a Hub dataset.")
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}: it must be at least 1.")
    if weights is not None and (len(weights) != len(sources) or not all(0 < w < float("inf") for w in weights)):
        raise ValueError(f"weights {weights} do not fit {len(sources)} source(s): give one positive number for each.")
    loaded = [_load_source(source, split, skip_malformed) for source in sources]
    rows = _mix([part for part, _ in loaded], weights, seed)
    if max_samples is not None and max_samples < len(rows):
        rows = rows.shuffle(seed=seed).select(range(max_samples))
    return rows, LoadReport(rows=len(rows), malformed=sum(malformed for _, malformed in loaded))


def _mix(parts: list[Dataset], weights: list[float] | None, seed: int) -> Dataset:
    if len(parts) == 1:
        return parts[0]
    if weights is not None:
        unit = min(len(part) / weight for part, weight in zip(parts, weights, strict=True))
        counts = [max(1, round(unit * weight)) for weight in weights]
        parts = [part.shuffle(seed=seed).select(range(n)) for part, n in zip(parts, counts, strict=True)]
    return concatenate_datasets(parts).shuffle(seed=seed)


def _load_source(source: str, split: str, skip_malformed: bool) -> tuple[Dataset, int]:
    path = Path(source).expanduser()
    if path.exists():
        loaded = [_load_file(file, skip_malformed) for file in _files(path)]
    elif re.fullmatch(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?", source) and path.suffix not in SUFFIXES:
        name, _, config = source.partition(":")
        loaded = [_normalise_dataset(load_dataset(name, config or None, split=split), source, skip_malformed)]
    else:
        raise ValueError(f"{source!r} is no file or folder here, and no Hub dataset (user/name or user/name:config).")
    rows, malformed = concatenate_datasets([part for part, _ in loaded]), sum(count for _, count in loaded)
    if len(rows) == 0:
        raise ValueError(f"{source} holds no good rows ({malformed} malformed). Accepted columns: {ACCEPTED}.")
    return rows, malformed


def _files(path: Path) -> list[Path]:
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in SUFFIXES:
        raise ValueError(f"{path} is not a file or a folder of files that end in {', '.join(SUFFIXES)}.")
    return files


def _load_file(path: Path, skip_malformed: bool) -> tuple[Dataset, int]:
    if path.suffix == ".parquet":
        return _normalise_dataset(Dataset.from_parquet(str(path)), str(path), skip_malformed)
    with path.open("rb") as file:
        is_array = file.read(4096).lstrip().startswith(b"[")
    tables, good, bad = [ROWS.arrow_schema.empty_table()], [], []
    for record in _read_array(path) if is_array else _read_lines(path):
        if not isinstance(record, ValueError):
            good.append(record)
        elif skip_malformed:
            bad.append(record)
        else:
            raise ValueError(f"{record} Repair the file, or go on with the good records by --skip_malformed.")
        if len(good) == 1000:
            tables.append(pa.Table.from_pylist(good, schema=ROWS.arrow_schema))
            good = []
    tables.append(pa.Table.from_pylist(good, schema=ROWS.arrow_schema))
    rows = Dataset(pa.concat_tables(tables))
    if bad:
        logger.warning("%d good records, %d malformed one(s) left out, first: %s", len(rows), len(bad), bad[0])
    return rows, len(bad)


def _read_array(path: Path) -> Iterator[dict | ValueError]:
    """Streams the records of a JSON array, normalised; what is wrong with one comes in its place."""
    number = 0
    with path.open("rb") as file:
        try:
            for number, record in enumerate(ijson.items(file, "item", use_float=True), start=1):
                yield _normalise(record, f"{path}: record {number}")
        except ijson.JSONError:
            byte, size = _first_bad_byte(path), path.stat().st_size
            where = f"{path}: byte {byte} of {size}, record {number + 1}"
            yield ValueError(f"{where}: the JSON array is broken or cut off here, the rest cannot be read.")


def _first_bad_byte(path: Path) -> int:
    """ijson does not say where it failed: feed the parser again in blocks, then the failing block byte by byte."""
    data, good = path.read_bytes(), 0
    for step in (1 << 16, 1):
        parser = ijson.basic_parse_coro(_sink())
        try:
            if good:  # an empty block would mean the end
                parser.send(data[:good])
            while good < len(data):
                parser.send(data[good : good + step])
                good += step
        except ijson.JSONError:
            pass
    return min(good, len(data))


@ijson.utils.coroutine
def _sink():
    while True:
        yield


def _read_lines(path: Path) -> Iterator[dict | ValueError]:
    """Streams the records of JSON Lines, normalised; what is wrong with one comes in its place."""
    start = number = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                number += 1
                yield _parse_line(line, start, f"{path}: byte {{}}, record {number}")
            start += len(line)


def _parse_line(line: bytes, start: int, where: str) -> dict | ValueError:
    try:
        text = line.decode()
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # a lone surrogate is valid JSON and no text
    except json.JSONDecodeError as error:
        return ValueError(f"{where.format(start + len(text[: error.pos].encode()))}: {error.msg}.")
    except UnicodeError as error:
        return ValueError(f"{where.format(start)}: {error}.")
    return _normalise(record, where.format(start))


def _normalise_dataset(dataset: Dataset, source: str, skip_malformed: bool) -> tuple[Dataset, int]:
    def normalise(batch, indices):
        records = [_normalise(row, f"{source}: record {i + 1}") for i, row in zip(indices, _rows(batch), strict=True)]
        errors = [record for record in records if isinstance(record, ValueError)]
        if errors and not skip_malformed:
            raise errors[0]
        good = [record for record in records if not isinstance(record, ValueError)]
        return {name: [record.get(name) for record in good] for name in ROWS}

    options = {"batched": True, "with_indices": True, "remove_columns": dataset.column_names, "desc": "Reading"}
    rows = dataset.map(normalise, features=ROWS, load_from_cache_file=False, **options)
    malformed = len(dataset) - len(rows)
    if malformed:
        logger.warning("%s: %d good records, %d malformed one(s) left out.", source, len(rows), malformed)
    return rows, malformed


def _rows(batch: dict[str, list]) -> list[dict]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _normalise(record: object, where: str) -> dict | ValueError:
    """The record in the columns of ROWS, or what is wrong with it."""
    try:
        return _to_row(record)
    except ValueError as error:
        return ValueError(f"{where}: {error}")


def _to_row(record: object) -> dict:
    if not isinstance(record, dict):
        raise ValueError(f"{record!r:.60} is no object with the columns {ACCEPTED}.")
    have = {name for name, value in record.items() if value is not None}
    for name in ("messages", "conversations"):
        if name in have:
            return {"messages": _messages(record[name])}
    if have >= {"prompt", "completion"}:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return {"prompt": prompt, "completion": completion}
        return {"messages": _messages(prompt) + _messages(completion)}
    if "input_ids" in have and have & {"assistant_masks", "labels"}:
        return _pretokenized(record)
    if record.keys() & {"messages", "conversations"}:
        return {"messages": []}
    raise ValueError(f"the columns {sorted(record)} are of no known schema. Accepted: {ACCEPTED}.")


def _messages(items: object) -> list[dict]:
    if not isinstance(items, list):
        raise ValueError(f"expected a list of messages, found {items!r:.60}.")
    return [_message(item) for item in items]


def _message(item: object) -> dict:
    for role, content in (("role", "content"), ("from", "value")):
        if isinstance(item, dict) and isinstance(item.get(role), str) and isinstance(item.get(content), str | None):
            return {"role": item[role], "content": item.get(content)}
    raise ValueError(f"a message needs text in role and content (or from and value), found {item!r:.60}.")


def _pretokenized(record: dict) -> dict:
    ids, mask = record["input_ids"], record.get("assistant_masks")
    if mask is None:
        mask = [int(label != -100) for label in record["labels"]]
        if any(label not in (-100, token) for label, token in zip(record["labels"], ids, strict=False)):
            raise ValueError("labels must be input_ids itself (not shifted), or -100 where nothing is supervised.")
    if len(ids) != len(mask) or not set(mask) <= {0, 1}:
        raise ValueError(f"{len(ids)} input_ids need as many 0/1 masks (or labels), found {len(mask)}.")
    return {"input_ids": ids, "assistant_masks": mask}


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
    prepared = [_prepare(row, tokenizer) for row in _rows(batch)]
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
    if not any(mask[:max_length]):
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
