"""The draft's vocabulary: the target tokens that the supervised text uses most.

Letters: V target vocabulary, D draft vocabulary. `d2t` [D] holds offsets, target id = draft id + d2t[draft id]; `t2d`
[V] says which target tokens are kept. Kept ids ascend.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def count_supervised_tokens(dataset: Dataset, vocab_size: int) -> Tensor:
    """How often each target token is supervised, int64 [V]. A supervised id outside the vocabulary is a ValueError."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for _, ids, mask in token_buffers(dataset):
        supervised = ids[mask != 0]
        if len(supervised) and not 0 <= supervised.min() <= supervised.max() < vocab_size:
            raise ValueError(
                f"Token ids {supervised.min()} to {supervised.max()} are supervised and the target's vocabulary has "
                f"{vocab_size}: tokenize with the target's own tokenizer."
            )
        counts += np.bincount(supervised, minlength=vocab_size)
    return torch.from_numpy(counts)


def token_buffers(dataset: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Row lengths, token ids and masks of a thousand rows at a time, flat."""
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        ids = table.column("input_ids").combine_chunks()
        mask = table.column("assistant_masks").combine_chunks()
        lengths = ids.value_lengths()
        if not lengths.equals(mask.value_lengths()):
            raise ValueError("input_ids and assistant_masks differ in length: tokenize the rows again.")
        yield lengths.to_numpy(), ids.flatten().to_numpy(), mask.flatten().to_numpy()


def is_ready(dataset: Dataset, max_length: int) -> bool:
    """Whether these are tokenised rows that fit, each with a token to learn: as `tokenize_rows` leaves them."""
    if set(dataset.column_names) != {"input_ids", "assistant_masks"}:
        return False
    for lengths, _, mask in token_buffers(dataset):
        if lengths.max() > max_length:
            return False
        starts = np.cumsum(lengths) - lengths
        learned = np.zeros(len(mask) + 1, dtype=np.int64)
        learned[:-1] = np.append((mask[:-1] != 0) & (mask[1:] != 0), False)  # this token and the next
        learned[starts] = 0  # no slot before the first token
        learned[starts[1:] - 1] = 0  # the next one is of another row
        if not np.add.reduceat(learned, starts).all():
            return False
    return True


def select_draft_vocabulary(counts: Tensor, draft_vocab_size: int, always: Iterable[int]) -> tuple[Tensor, Tensor]:
    """The D most frequent tokens as (d2t int64 [D], t2d bool [V]); ties go to the lower id.

    The tokens in `always` are kept whatever their count.

    Raises:
        ValueError: D is not in 1..V, `always` holds more than D tokens or one outside the vocabulary.
    """
    vocab_size, always = len(counts), sorted(set(always))
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size {draft_vocab_size} must be from 1 to the target's vocabulary, {vocab_size}."
        )
    if len(always) > draft_vocab_size:
        raise ValueError(
            f"draft_vocab_size {draft_vocab_size} has no room for the {len(always)} special tokens: raise it."
        )
    if always and not 0 <= always[0] <= always[-1] < vocab_size:
        raise ValueError(
            f"Special token ids {always} are outside the target's vocabulary, {vocab_size}: wrong tokenizer?"
        )
    ranked = counts.clone()
    ranked[always] = counts.max() + 1
    kept = torch.sort(ranked, descending=True, stable=True).indices[:draft_vocab_size].sort().values  # [D]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(draft_vocab_size), t2d


def coverage(counts: Tensor, t2d: Tensor) -> float:
    """The share of the supervised tokens that the draft can propose. No supervised token at all is a ValueError."""
    if counts.sum() == 0:
        raise ValueError("No token is supervised: check the chat template and the data (--preview 3).")
    return counts[t2d].sum().item() / counts.sum().item()


def cached_draft_vocabulary(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    draft_vocab_size: int,
    vocab_size: int,
    extra_ids: Iterable[int],
    cache_dir: str | os.PathLike,
) -> tuple[Tensor, Tensor, float]:
    """d2t, t2d and coverage, from a file in `cache_dir` named by a hash of everything they depend on.

    Special tokens and `extra_ids` (the generation config's end-of-turn ids) are always in. A damaged file is rebuilt.

    Raises:
        ValueError: As `count_supervised_tokens`, `select_draft_vocabulary` and `coverage`.
    """
    marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    always = sorted({*tokenizer.all_special_ids, *marked, *extra_ids})
    key = _content_hash(dataset, tokenizer, draft_vocab_size, vocab_size, always)
    path = Path(cache_dir) / f"draft-vocabulary-{key}.safetensors"
    if path.exists():
        try:
            saved = load_file(path)
            return saved["d2t"], saved["t2d"], saved["coverage"].item()
        except (SafetensorError, KeyError) as error:
            logger.warning("%s is damaged (%s): building it again.", path, error)
    counts = count_supervised_tokens(dataset, vocab_size)
    d2t, t2d = select_draft_vocabulary(counts, draft_vocab_size, always)
    share = torch.tensor(coverage(counts, t2d), dtype=torch.float64)
    _save_atomically({"d2t": d2t, "t2d": t2d, "coverage": share}, path)
    return d2t, t2d, share.item()


def _content_hash(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, draft_vocab_size: int, vocab_size: int, always: list[int]
) -> str:
    digest = hashlib.sha256()
    vocabulary = sorted(tokenizer.get_vocab().items())
    digest.update(json.dumps([draft_vocab_size, vocab_size, always, vocabulary]).encode())
    for lengths, ids, mask in token_buffers(dataset):
        for array, dtype in ((lengths, np.int64), (ids, np.int64), (mask, np.int8)):
            digest.update(array.astype(dtype).tobytes())
    return digest.hexdigest()[:32]


def _save_atomically(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        save_file(tensors, Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)
