"""The draft vocabulary is the most frequent supervised tokens, always with the special ones, and cached by content."""

import time

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eagle3_llama.trainer.draft_vocabulary import (
    cached_draft_vocabulary,
    count_supervised_tokens,
    coverage,
    select_draft_vocabulary,
)

ROWS = [
    {"input_ids": [1, 5, 5, 7, 2], "assistant_masks": [0, 0, 1, 1, 1]},
    {"input_ids": [7, 9], "assistant_masks": [1, 0]},
]


def word_tokenizer(size=12, eos="w2"):
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token=eos)


def test_only_supervised_tokens_are_counted():
    counts = count_supervised_tokens(Dataset.from_list(ROWS), 12)
    assert counts.dtype == torch.long and counts.tolist() == [0, 0, 1, 0, 0, 1, 0, 2, 0, 0, 0, 0]


def test_counting_follows_a_selection_of_rows():
    dataset = Dataset.from_list(ROWS * 2000).select([3, 3999])
    assert count_supervised_tokens(dataset, 12)[7] == 2


def test_supervised_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="ids 2 to 7 are supervised and the target's vocabulary has 7"):
        count_supervised_tokens(Dataset.from_list(ROWS), 7)


def test_kept_tokens_are_the_most_frequent_and_ties_go_to_the_lower_id():
    d2t, t2d = select_draft_vocabulary(torch.tensor([0, 3, 1, 9, 1, 1]), 3, always=[])
    assert (d2t + torch.arange(3)).tolist() == [1, 2, 3] and d2t.dtype == torch.long
    assert t2d.tolist() == [False, True, True, True, False, False]


def test_special_tokens_are_kept_without_being_counted():
    d2t, t2d = select_draft_vocabulary(torch.tensor([0, 3, 1, 9, 1, 0]), 2, always=[5])
    assert (d2t + torch.arange(2)).tolist() == [3, 5] == t2d.nonzero().flatten().tolist()


def test_corpus_with_too_few_tokens_is_filled_with_the_lowest_ids():
    d2t, _ = select_draft_vocabulary(torch.tensor([0, 0, 0, 0, 4, 0]), 4, always=[])
    assert (d2t + torch.arange(4)).tolist() == [0, 1, 2, 4]


def test_whole_vocabulary_has_no_offsets():
    d2t, t2d = select_draft_vocabulary(torch.tensor([0, 3, 1]), 3, always=[0])
    assert d2t.tolist() == [0, 0, 0] and t2d.all()


@pytest.mark.parametrize(
    "size, always, message",
    [
        (7, [], "draft_vocab_size 7 must be from 1 to"),
        (0, [], "draft_vocab_size 0"),
        (1, [0, 1], "no room"),
        (3, [6], r"\[6\] are outside"),
    ],
)
def test_vocabulary_that_cannot_be_is_refused(size, always, message):
    with pytest.raises(ValueError, match=message):
        select_draft_vocabulary(torch.ones(6, dtype=torch.long), size, always)


def test_llama3_size_takes_well_under_a_second():
    counts = torch.randint(0, 1000, (128256,), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    d2t, t2d = select_draft_vocabulary(counts, 32000, always=range(128000, 128256))
    assert time.perf_counter() - start < 0.5
    kept = d2t + torch.arange(32000)
    assert t2d.sum() == 32000 and t2d[kept].all() and t2d[128000:].all() and (kept.diff() > 0).all()


def test_coverage_is_the_share_of_supervised_tokens_kept():
    assert coverage(torch.tensor([6, 2, 2]), torch.tensor([True, False, True])) == 0.8
    with pytest.raises(ValueError, match="No token is supervised"):
        coverage(torch.zeros(3), torch.ones(3, dtype=torch.bool))


def cached(folder, rows=ROWS, tokenizer=None, size=4, vocab_size=12, extra_ids=(3,)):
    return cached_draft_vocabulary(
        Dataset.from_list(rows), tokenizer or word_tokenizer(), size, vocab_size, extra_ids, folder
    )


def test_cached_vocabulary_is_read_back_the_same(tmp_path, monkeypatch):
    d2t, t2d, share = cached(tmp_path)
    assert t2d.nonzero().flatten().tolist() == [0, 2, 3, 7] and share == 0.75
    monkeypatch.setattr("eagle3_llama.trainer.draft_vocabulary.count_supervised_tokens", None)
    again = cached(tmp_path)
    assert torch.equal(d2t, again[0]) and torch.equal(t2d, again[1]) and share == again[2]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"size": 5},
        {"vocab_size": 13},
        {"extra_ids": (4,)},
        {"tokenizer": word_tokenizer(size=11)},
        {"tokenizer": word_tokenizer(eos="w5")},
        {"rows": [ROWS[0], {"input_ids": [7, 8], "assistant_masks": [1, 0]}]},
        {"rows": [ROWS[0], {"input_ids": [7, 9], "assistant_masks": [1, 1]}]},
        {"rows": [{name: ROWS[0][name] + ROWS[1][name] for name in ROWS[0]}]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_anything_changed_is_a_new_file(tmp_path, changed):
    cached(tmp_path)
    cached(tmp_path, **changed)
    assert len(list(tmp_path.iterdir())) == 2


def test_damaged_cache_is_built_again(tmp_path):
    d2t, _, _ = cached(tmp_path)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    assert torch.equal(cached(tmp_path)[0], d2t)
    path.write_bytes(b"")
    assert torch.equal(cached(tmp_path)[0], d2t)
    assert list(tmp_path.iterdir()) == [path]


def test_every_token_marked_special_is_kept(tmp_path):
    """all_special_ids has only those with a role; a chat template uses others too."""
    words = {word: i for i, word in enumerate(["<unk>", "<|end|>", "<|tool|>", *"abcdefgh"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>")
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
    assert 2 not in tokenizer.all_special_ids
    dataset = Dataset.from_list([{"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}])
    _, t2d, _ = cached_draft_vocabulary(dataset, tokenizer, 6, len(words), [], tmp_path)
    assert t2d[:3].all() and t2d[[6, 7]].all()
