"""The target's own answers: exact, in order, resumed, in process and by a server."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from toy import toy_target, toy_tokenizer

from eagle3_llama.trainer import regenerate
from eagle3_llama.trainer.conversations import tokenize_rows
from eagle3_llama.trainer.records import load_rows

STOP = [2, *range(9, 64, 9)]  # many, so that some answers end


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a toy target and its tokenizer."""
    folder, model = tmp_path_factory.mktemp("target"), toy_target()
    model.generation_config.eos_token_id = STOP
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path):
    """Twelve conversations of one to three turns."""
    generator, rows = torch.Generator().manual_seed(5), []
    for i in range(12):
        words = [f"a{n}" for n in torch.randint(54, (40,), generator=generator).tolist()]
        turns = [" ".join(words[4 * k : 4 * k + 1 + (i + k) % 4]) for k in range(2 * (1 + i % 3))]
        rows.append({"messages": [{"role": ("user", "assistant")[k % 2], "content": t} for k, t in enumerate(turns)]})
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["regenerate.py", *map(str, arguments)])
    regenerate.main()


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def own_answers(model, ids, mask, limit):
    """What `generate` writes in place of the masked runs, one prompt alone."""
    out_ids, out_mask = [], []
    for i, (token, by_target) in enumerate(zip(ids, mask, strict=True)):
        if not by_target:
            out_ids.append(token)
            out_mask.append(0)
        elif not mask[i - 1]:
            prompt = torch.tensor([out_ids])
            new = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=limit, pad_token_id=0
            )[0, len(out_ids) :].tolist()
            out_ids += new
            out_mask += [1] * len(new)
            if new[-1] not in STOP:
                break
    last = len(out_mask) - out_mask[::-1].index(1)
    return out_ids[:last], out_mask[:last]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_answers_are_what_generate_writes_alone(target, chats, tmp_path, monkeypatch, batch_size):
    output = tmp_path / "own.jsonl"
    common = ["--dtype", "float32", "--max_new_tokens", 12, "--batch_size", batch_size, "--max_repeats", 0]
    call(monkeypatch, "--target", target, "--prompts", chats, "--output", output, *common)
    model = regenerate.load_target(str(target), dtype=torch.float32)
    dataset, _ = tokenize_rows(load_rows([str(chats)])[0], toy_tokenizer(), 2048)
    written = read(output)
    assert [row["index"] for row in written] == list(range(12))
    for row, before in zip(written, dataset, strict=True):
        ids, mask = own_answers(model, before["input_ids"], before["assistant_masks"], 12)
        assert row["input_ids"] == ids and row["assistant_masks"] == mask
        assert row["finish_reason"] == ("stop" if ids[-1] in STOP else "length")
    assert {row["finish_reason"] for row in written} == {"stop", "length"}
    trained, dropped = tokenize_rows(load_rows([str(output)])[0], toy_tokenizer(), 2048)
    assert len(trained) + dropped.total() == 12 and trained[0]["input_ids"] == written[0]["input_ids"]


def test_a_stopped_run_goes_on_to_the_same_file(target, chats, tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    common = ["--target", target, "--prompts", chats, "--dtype", "float32", "--max_new_tokens", 9, "--batch_size", 4]
    call(monkeypatch, *common, "--temperature", 1, "--output", whole)
    stop_after(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        call(monkeypatch, *common, "--temperature", 1, "--output", parts)
    monkeypatch.undo()
    assert len(read(parts)) == 5
    with parts.open("a") as file:
        file.write('{"index":5,"finish_rea')
    call(monkeypatch, *common, "--temperature", 1, "--output", parts)
    assert parts.read_bytes() == whole.read_bytes()
    with pytest.raises(ValueError, match="other settings .temperature: 1.0 -> 0.0"):
        call(monkeypatch, *common, "--output", parts)
    assert f"{sum(map(sum, (row['assistant_masks'] for row in read(whole))))} tokens" in capsys.readouterr().out


def stop_after(monkeypatch, rows):
    """Ctrl-C once this many rows are in the output."""
    add_row, done = regenerate.add_row, []

    def add_row_and_stop(file, row):
        if len(done) == rows:
            raise KeyboardInterrupt
        add_row(file, row)
        done.append(row)

    monkeypatch.setattr(regenerate, "add_row", add_row_and_stop)


def test_a_run_that_wrote_nothing_binds_nobody(target, chats, tmp_path, monkeypatch):
    output = tmp_path / "own.jsonl"
    with pytest.raises(ValueError, match="nowhere.jsonl"):
        call(monkeypatch, "--target", target, "--prompts", "nowhere.jsonl", "--output", output)
    call(monkeypatch, "--target", target, "--prompts", chats, "--output", output, "--limit", 2, "--max_new_tokens", 3)
    call(monkeypatch, "--target", target, "--prompts", chats, "--output", output, "--limit", 4, "--max_new_tokens", 3)
    assert [row["index"] for row in read(output)] == [0, 1, 2, 3]
    settings = json.loads((tmp_path / "own.jsonl.settings").read_text())
    assert settings["settings"]["prompts"] == ["chats.jsonl"] and "commit" in settings


def test_questions_without_answers_long_ones_and_further_turns(target, tmp_path, monkeypatch, capsys):
    user, bot = {"role": "user", "content": "a1 a2"}, {"role": "assistant", "content": "a3"}
    rows = [[user], [{"role": "user", "content": "a1 " * 40}, bot], [user, bot, user, bot, user], [bot]]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "own.jsonl"
    prompts.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    common = ["--target", target, "--prompts", prompts, "--max_new_tokens", 30, "--max_length", 64]
    call(monkeypatch, *common, "--output", output, "--max_turns", 1)
    first, second = read(output)
    assert first["input_ids"] == second["input_ids"] and first["input_ids"][:5] == [4, 7, 8, 2, 5]
    assert first["text"].startswith("<|user|>")
    assert (first["index"], second["index"]) == (0, 2)
    assert "1 left out: no user turn, 1 left out: no room for an answer" in capsys.readouterr().out


def test_an_answer_is_cut_where_it_repeats_itself_again(target, chats, tmp_path, monkeypatch):
    common = ["--target", target, "--prompts", chats, "--dtype", "float32", "--max_new_tokens", 60, "--max_turns", 1]
    call(monkeypatch, *common, "--output", tmp_path / "all.jsonl", "--max_repeats", 0)
    call(monkeypatch, *common, "--output", tmp_path / "cut.jsonl", "--max_repeats", 2)
    reasons = set()
    for whole, cut in zip(read(tmp_path / "all.jsonl"), read(tmp_path / "cut.jsonl"), strict=True):
        size, start = len(cut["input_ids"]), cut["assistant_masks"].index(1)
        assert cut["input_ids"] == whole["input_ids"][:size] and cut["index"] == whole["index"]
        runs = [tuple(cut["input_ids"][i : i + 8]) for i in range(start, size - 7)]
        repeats = [runs[:i].count(run) for i, run in enumerate(runs)]
        assert all(number < 2 for number in repeats[:-1])
        assert cut["finish_reason"] == ("repeats" if repeats and repeats[-1] == 2 else whole["finish_reason"])
        reasons.add(cut["finish_reason"])
    assert {"repeats", "stop"} <= reasons


def test_what_is_drawn_is_drawn_from_the_nucleus():
    probs = torch.tensor([0.4, 0.05, 0.3, 0.25])
    rows = [regenerate.Row(i, [], [], random.Random(i)) for i in range(4000)]
    drawn = torch.tensor(regenerate.pick((probs.log() * 0.5).expand(4000, -1), rows, 0.5, 0.9))
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert torch.allclose(shares, torch.tensor([0.4, 0, 0.3, 0.25]) / 0.95, atol=0.03)
    assert regenerate.pick(probs[None], rows[:1], 0.0, 0.9) == [0]


@pytest.mark.parametrize("batch_size", [3, 16])
def test_the_target_writes_its_own_prompts(target, tmp_path, monkeypatch, batch_size):
    output = tmp_path / "own.jsonl"
    common = ["--target", target, "--dtype", "float32", "--max_new_tokens", 5, "--max_prompt_tokens", 6]
    common += ["--batch_size", batch_size, "--output", output]
    call(monkeypatch, *common, "--self_prompts", 4)
    early = output.read_bytes()
    call(monkeypatch, *common, "--self_prompts", 9)
    assert output.read_bytes().startswith(early) and [row["index"] for row in read(output)] == list(range(9))
    kept = read(tmp_path / "own.jsonl.prompts")
    texts = [row["messages"][0]["content"] for row in kept]
    assert len(set(texts)) == 9 and not any("<" in text for text in texts)
    model, tokenizer = regenerate.load_target(str(target), dtype=torch.float32), toy_tokenizer()
    for row, text in zip(read(output), texts, strict=True):
        ids = [4, *tokenizer(text)["input_ids"], 2, 5]
        assert (
            len(ids) <= 6 + 2
            and row["input_ids"][: len(ids)] == ids
            and row["assistant_masks"][: len(ids)] == [0] * len(ids)
        )
        assert (row["input_ids"], row["assistant_masks"]) == own_answers(model, [*ids, 1], [0] * len(ids) + [1], 5)
    CANDIDATES[batch_size] = kept
    assert all(found == kept for found in CANDIDATES.values()), "the batch size changes what is sampled"


CANDIDATES = {}


def test_prompts_that_repeat_are_broken_or_only_markup_are_left_out(tmp_path):
    prompts = regenerate.Prompts(tmp_path / "prompts")
    texts = ["What is tau?", "what  is\ntau? ", "", " \n", "<br/>", "1 + 1", "\ufffd what", "What is 1 + 1?"]
    assert [prompts.offer(i, text) for i, text in enumerate(texts)] == [True, *[False] * 6, True]
    again = regenerate.Prompts(tmp_path / "prompts")
    assert again.kept == prompts.kept and again.next == 8 and not again.offer(8, "What is tau?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --prompts"),
        (["--prompts", "x", "--self_prompts", "3"], "either --prompts"),
        (["--self_prompts", "3"], "--target is missing"),
        (["--self_prompts", "3", "--base_url", "http://127.0.0.1:9"], "--target is missing"),
        (["--target", "x", "--prompts", "x", "--batch_size", "0"], "--batch_size is 0"),
        (["--target", "x", "--self_prompts", "3", "--prompt_temperature", "0"], "--prompt_temperature above 0"),
        (["--target", "x", "--prompts", "x", "--output", "own.json"], "end in .jsonl"),
    ],
)
def test_options_that_do_not_fit_are_refused(monkeypatch, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(monkeypatch, "--output", "own.jsonl", *arguments)


class Server(ThreadingHTTPServer):
    """Answers out of order; `faults` are taken by the first requests, one each."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.faults, self.seen, self.busy, self.most = (
            f"http://127.0.0.1:{self.server_port}/v1",
            [],
            [],
            0,
            0,
        )
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": "toy"}]})

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append((self.path, body, self.headers.get("Authorization")))
            fault = server.faults.pop(0) if server.faults else None
            server.busy += 1
            server.most = max(server.most, server.busy)
        time.sleep(random.random() / 50)
        with server.lock:
            server.busy -= 1
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
        elif fault:
            self.reply(fault, {"error": {"message": "no such thing"}})
        else:
            self.reply(200, {"choices": [answer(self.path, body)]})

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def answer(path, body):
    """Determined by what is asked; one in four is cut off."""
    key = json.dumps(body.get("messages") or body["seed"])
    finish = "length" if zlib.crc32(key.encode()) % 4 == 0 else "stop"
    if path == "/v1/completions":
        return {"text": f" question {body['seed'] % 7}?", "finish_reason": finish}
    last = body["messages"][-1]["content"]
    return {
        "message": {"role": "assistant", "content": f"a{zlib.crc32(key.encode()) % 54} {last}"},
        "finish_reason": finish,
    }


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(regenerate, "BACKOFF", 0.01)
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def expected(chats, keep_unfinished=False):
    """The rows that the server's answers make, asked one after another."""
    for index, row in enumerate(read(chats)):
        history, kept, reason = [], 0, "stop"
        for message in row["messages"]:
            if message["role"] == "user":
                history.append(message)
                continue
            choice = answer("/v1/chat/completions", {"messages": history})
            if choice["finish_reason"] == "length" and not keep_unfinished:
                break
            history.append(choice["message"])
            kept, reason = len(history), choice["finish_reason"]
            if reason == "length":
                break
        if kept:
            yield {"index": index, "finish_reason": reason, "messages": history[:kept]}


@pytest.mark.parametrize("keep", [False, True])
def test_a_server_answers_in_order_and_only_finished_answers_are_kept(
    server, chats, tmp_path, monkeypatch, capsys, keep
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.faults = [500, None, "lost", 429, None, 503]
    output = tmp_path / "own.jsonl"
    flags = ["--keep_unfinished"] if keep else []
    call(monkeypatch, "--base_url", server.url, "--prompts", chats, "--output", output, "--concurrency", 3, *flags)
    rows = list(expected(chats, keep))
    assert read(output) == rows and (len(rows) == 12) == keep
    path, body, key = server.seen[0]
    assert path == "/v1/chat/completions" and key == "Bearer secret" and server.most == 3
    assert {"model": "toy", "temperature": 0.0, "max_tokens": 256}.items() <= body.items() and "seed" not in body
    assert f"{12 - len(rows)} left out: unfinished answer" in capsys.readouterr().out or keep
    tokenize_rows(load_rows([str(output)])[0], toy_tokenizer(), 2048)


def test_a_refusal_shows_what_the_server_says_and_the_rest_goes_on(server, chats, tmp_path, monkeypatch):
    output = tmp_path / "own.jsonl"
    common = ["--base_url", server.url, "--prompts", chats, "--output", output, "--concurrency", 2]
    server.faults = [None] * 8 + [400]
    with pytest.raises(ValueError, match="chat/completions refuses: status 400: .*no such thing"):
        call(monkeypatch, *common)
    rows = list(expected(chats))
    assert read(output) == rows[: len(read(output))]
    server.faults = [503] * 100
    with pytest.raises(ValueError, match="failed 7 times .status 503.*the same command goes on"):
        call(monkeypatch, *common)
    server.faults = []
    call(monkeypatch, *common)
    assert read(output) == rows


def test_prompts_by_a_server(server, target, tmp_path, monkeypatch):
    output = tmp_path / "own.jsonl"
    common = ["--base_url", server.url, "--target", target, "--output", output, "--concurrency", 4]
    call(monkeypatch, *common, "--self_prompts", 5)
    prompts = read(tmp_path / "own.jsonl.prompts")
    numbers = [n for n in range(42, 62) if answer("/v1/completions", {"seed": n})["finish_reason"] == "stop"]
    assert [row["messages"][0]["content"] for row in prompts] == [f"question {n % 7}?" for n in numbers[:5]]
    assert server.seen[0][1]["prompt"] == [4] and server.seen[0][1]["temperature"] == 1.0
    asked = tmp_path / "asked.jsonl"
    rows = [{"messages": [*row["messages"], {"role": "assistant"}]} for row in prompts]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(output) == list(expected(asked))
    with pytest.raises(ValueError, match="only .* candidates are good prompts"):
        call(monkeypatch, *common, "--self_prompts", 8)


def test_a_server_that_is_not_there(chats, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="names no model.*give --target"):
        call(monkeypatch, "--base_url", "http://127.0.0.1:9/v1", "--prompts", chats, "--output", tmp_path / "o.jsonl")


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(server, chats, tmp_path):
    command = [sys.executable, regenerate.__file__, "--base_url", server.url, "--prompts", chats]
    server.faults = [503] * 1000  # it tries again for two minutes
    process = subprocess.Popen(
        [*map(str, command), "--output", str(tmp_path / "o.jsonl")], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not server.seen and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command goes on" in errors and "Traceback" not in errors
