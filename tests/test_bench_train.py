"""The training benchmark: what it counts, how it goes on, and when it skips."""

import json
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode
from toy import toy_target, toy_tokenizer

from eagle3_llama.evaluation import bench_train
from eagle3_llama.evaluation.bench_train import draft_and_target_config, main, parse_arguments, step_flops

TOY = ["--geometry", "toy", "--ttt_steps", "3", "--iters", "1"]


def toy_step(slots, layers, steps):
    """Run one step in fp32; returns what the loss counted."""
    draft = bench_train.random_draft("toy", layers, torch.float32)
    inputs = bench_train.random_inputs(draft, slots, torch.float32)
    return bench_train.training_step(Accelerator(cpu=True), draft, draft, inputs, steps)


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (1, 4), (3, 2)])
def test_the_counted_products_are_those_of_the_step(layers, steps):
    in_place = {torch.ops.aten.addmm_: lambda _, x, y, **__: 2 * x[0] * x[1] * y[1]}  # torch 2.13 does not count it
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        toy_step(24, layers, steps)
    counted = step_flops(draft_and_target_config("toy", layers)[0], 24, steps)
    # Nor has it a formula for the CPU's flash kernel.
    assert sum(counter.get_flop_counts()["Global"].values()) == sum(counted.values()) - counted["attention"]


def test_attention_counts_seven_products_over_the_lower_triangle():
    config = draft_and_target_config("toy", 2)[0]
    triangle = sum(1 for query in range(5) for key in range(5) if key <= query)
    one = 2 * triangle * config.num_attention_heads * config.head_dim
    assert step_flops(config, 5, 3)["attention"] == 7 * one * 2 * 3


def test_every_token_is_supervised_and_within_the_draft_vocabulary():
    result = toy_step(24, 1, 3)
    assert result.supervised.tolist() == [22, 21, 20]
    assert result.covered == 22


@pytest.mark.slow
def test_one_step_in_its_own_process():
    words = [sys.executable, bench_train.__file__, "--one", "2048", "2", *TOY, "--dtype", "bfloat16"]
    cell = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert (cell["S"], cell["N"], cell["K"], cell["threads"], cell["tokens"]) == (2048, 2, 3, 1, 2048)
    assert cell["dtype"] == "bfloat16"
    assert cell["wall_s"] > 0 and 0 < cell["floor_s"] < cell["cpu_s"]
    assert cell["peak_mb"] > cell["before_mb"] > 50


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the command in an empty folder with steps that cost nothing; returns the cells that were started."""
    started = []

    def fake_run(words, **_):
        engine = next((name for name in ("specforge", "speculators") if name in words[1]), "")
        slots, layers = (
            (int(words[words.index("--seq") + 1]), 1) if engine else map(int, words[words.index("--one") + 1 :][:2])
        )
        started.append((engine, slots, layers))
        gflop = dict.fromkeys(step_flops(draft_and_target_config("toy", 1)[0], 8, 1), 1.0)
        cell = {"engine": bench_train.OURS, "S": slots, "N": layers, "tokens": slots, "wall_s": 2.0, "cpu_s": 1.0}
        cell |= {"peak_mb": 500.0, "before_mb": 300.0, "gflop": gflop, "matmul_gflop_s": 9.0, "floor_s": 0.5}
        peer = {"cpu_s": 2.0, "total_s": 3.0, "peak_rss_mb": 1000}
        out = f"a warning\n{json.dumps(peer if engine else cell)}\n"
        return subprocess.CompletedProcess(words, 0, out, "")

    def run(*words):
        started.clear()
        monkeypatch.setattr(sys, "argv", ["bench_train.py", *TOY, *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        return list(started)

    monkeypatch.chdir(tmp_path)
    run.fake, run.folder = fake_run, tmp_path
    monkeypatch.setattr(bench_train, "provenance", lambda: dict(machine="m", versions="v", commit="c0ffee00"))
    monkeypatch.setattr(bench_train.subprocess, "run", lambda words, **options: run.fake(words, **options))
    return run


def test_without_their_folder_the_peers_are_skipped_with_the_remedy(bench, capsys):
    assert bench("--lengths", "8", "16", "--layers", "1", "2") == [("", 8, 1), ("", 8, 2), ("", 16, 1), ("", 16, 2)]
    assert "peers: skipped, give PEERS=folder" in capsys.readouterr().out
    assert (bench.folder / "docs/bench-train.png").stat().st_size > 1000


def test_peers_stand_beside_ours_and_are_divided_by(bench):
    (bench.folder / "peers").mkdir()
    for name in ("specforge_step.py", "speculators_step.py"):
        (bench.folder / "peers" / name).touch()
    (bench.folder / "outputs/peer-src").mkdir(parents=True)
    (bench.folder / "outputs/peer-src/complete").touch()
    started = bench("--lengths", "8", "--layers", "1", "2", "--peers_dir", "peers")
    assert started == [("", 8, 1), ("specforge", 8, 1), ("speculators", 8, 1), ("", 8, 2)]
    table = (bench.folder / "outputs/bench-train.md").read_text()
    assert "| eagle3-llama | 1 | 8 | 1.00 | 0.50 | 1.0 | 0.50 | 0.50 | 500 | 0.50 | 300 |" in table
    assert "| SpecForge | 1 | 8 | 2.00 | 1.00 | 1.0 |  |  | 1000 | 1.00 |  |" in table


def test_peers_whose_wheels_cannot_be_had_are_skipped(bench, capsys):
    (bench.folder / "peers").mkdir()
    for name in ("specforge_step.py", "speculators_step.py"):
        (bench.folder / "peers" / name).touch()
    ours = bench.fake

    def no_network(words, **options):
        if "pip" in words:
            raise subprocess.CalledProcessError(1, words)
        return ours(words, **options)

    bench.fake = no_network
    assert bench("--lengths", "8", "--layers", "1", "--peers_dir", "peers") == [("", 8, 1)]
    assert "wheels cannot be installed" in capsys.readouterr().out


def test_a_stopped_run_goes_on(bench):
    ours = bench.fake

    def interrupted(words, **options):
        if "16" in words:
            raise KeyboardInterrupt
        return ours(words, **options)

    bench.fake = interrupted
    with pytest.raises(KeyboardInterrupt):
        bench("--lengths", "8", "16", "--layers", "1")
    bench.fake = ours
    assert bench("--lengths", "8", "16", "--layers", "1") == [("", 16, 1)]
    assert bench("--lengths", "8", "16", "--layers", "1") == []


def test_figures_of_another_commit_are_not_mixed(bench, monkeypatch):
    bench("--lengths", "8", "--layers", "1")
    monkeypatch.setattr(bench_train, "provenance", lambda: dict(machine="m", versions="v", commit="decaf000"))
    with pytest.raises(ValueError, match="commit: c0ffee00 -> decaf000.*--output"):
        bench("--lengths", "8", "--layers", "1")


def test_a_step_of_ours_that_fails_stops_the_bench(bench, capsys):
    bench.fake = lambda words, **_: subprocess.CompletedProcess(words, 1, "", "RuntimeError: no memory")
    with pytest.raises(AssertionError):
        bench("--lengths", "8", "--layers", "1")
    assert "exit status 1: RuntimeError: no memory" in capsys.readouterr().out


def test_without_a_gpu_the_gpu_part_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["--device", "cuda"], ["--device", "cuda", "--one", "8", "1"]):
        monkeypatch.setattr(sys, "argv", ["bench_train.py", *words])
        main()
        assert capsys.readouterr().out == "skipped: no CUDA device\n"


def test_the_gpu_table():
    cell = {"engine": bench_train.OURS, "S": 2048, "N": 1, "tokens": 2048, "wall_s": 0.5, "peak_mb": 10240}
    cell |= {"before_mb": 5120, "gflop": {"MLP": 1e5}, "matmul_gflop_s": 4e5, "floor_s": 0.25, "peak_tflop_s": 989}
    table = bench_train.markdown({"device": "cuda", "cells": [cell]})
    assert "| 1 | 2048 | 0.500 | 4096 | 10.0 | 5.0 | 200 | 0.20 | 0.50 |" in table


def test_the_parts_of_a_whole_step(monkeypatch, tmp_path):
    target = toy_target()
    target.generation_config.eos_token_id = 2
    target.save_pretrained(tmp_path / "target")
    toy_tokenizer().save_pretrained(tmp_path / "target")
    recipe = ["ttt_steps: 2", "draft_vocab_size: 40", "max_length: 32", "target_dtype: float32", "use_cpu: true"]
    recipe += ["bf16: false", "per_device_train_batch_size: 2", "report_to: none"]
    (tmp_path / "recipe.yaml").write_text("\n".join(recipe))
    words = ["--parts", "--target", str(tmp_path / "target"), "--config", str(tmp_path / "recipe.yaml")]
    words += ["--row_length", "32", "--iters", "2", "--threads", "1", "--output", str(tmp_path / "out/bench")]
    monkeypatch.setattr(sys, "argv", ["bench_train.py", *words])
    main()
    found = json.loads((tmp_path / "out/bench-parts.json").read_text())
    assert list(found["parts_ms"]) == ["data", "target", "unroll", "loss", "backward", "optimiser"]
    assert all(ms > 0 for ms in found["parts_ms"].values())
    assert (found["tokens"], found["K"], found["S"]) == (64, 2, 32)
    assert "| all |" in (tmp_path / "out/bench-parts.md").read_text()


def test_the_recipe_needs_a_target(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--parts"])
    assert "--parts needs --target" in capsys.readouterr().err
