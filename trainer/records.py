"""Reading conversations: local JSON, JSON Lines and Parquet, Hub data sets, mixtures of them; in one set of columns.

    rows, report = load_rows(["sharegpt.json", "user/name"], skip_malformed=True)

Accepted rows: `messages` (role, content), ShareGPT `conversations` (from, value), `prompt` + `completion` (two
strings, or two lists of messages), and `input_ids` + `assistant_masks` or `labels`.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ijson
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_dataset

logger = logging.getLogger(__name__)

SUFFIXES = (".json", ".jsonl", ".parquet")
ACCEPTED = "messages | conversations | prompt + completion | input_ids + assistant_masks | input_ids + labels"
TOKENS = {"input_ids": List(Value("int32")), "assistant_masks": List(Value("int8"))}
MESSAGES = List({"role": Value("string"), "content": Value("string")})
ROWS = Features({"messages": MESSAGES, "prompt": Value("string"), "completion": Value("string"), **TOKENS})


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
        loaded = [normalise_dataset(load_dataset(name, config or None, split=split), source, skip_malformed)]
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
        return normalise_dataset(Dataset.from_parquet(str(path)), str(path), skip_malformed)
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(b"\xef\xbb\xbf"):
        raise ValueError(f"{path}: byte 0, record 1: the file starts with a byte order mark. Save it without one.")
    is_array = start.lstrip().startswith(b"[")
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


def normalise_dataset(dataset: Dataset, source: str, skip_malformed: bool) -> tuple[Dataset, int]:
    """Any accepted schema -> the columns of ROWS, and how many malformed records were left out. As load_rows."""

    def normalise(batch, indices):
        records = [
            _normalise(row, f"{source}: record {i + 1}") for i, row in zip(indices, batch_rows(batch), strict=True)
        ]
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


def batch_rows(batch: dict[str, list]) -> list[dict]:
    """A batch of `Dataset.map`, row by row."""
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
    for name in ("input_ids", "assistant_masks", "labels"):
        values = record.get(name)
        if values is not None and not (isinstance(values, list) and all(type(x) is int for x in values)):
            raise ValueError(f"{name} must be a list of integers, found {values!r:.60}.")
    if not all(0 <= token < 2**31 for token in ids):
        raise ValueError(f"input_ids must be from 0 to 2^31 - 1, found {min(ids)} to {max(ids)}.")
    if mask is None:
        mask = [int(label != -100) for label in record["labels"]]
        if any(label not in (-100, token) for label, token in zip(record["labels"], ids, strict=False)):
            raise ValueError("labels must be input_ids itself (not shifted), or -100 where nothing is supervised.")
    if len(ids) != len(mask) or not set(mask) <= {0, 1}:
        raise ValueError(f"{len(ids)} input_ids need as many 0/1 masks (or labels), found {len(mask)}.")
    return {"input_ids": ids, "assistant_masks": mask}
