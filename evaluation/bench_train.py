"""What one training step of a draft costs in time and memory, beside other projects' and beside the possible.

    python evaluation/bench_train.py                            # the table and the figure, on the CPU
    python evaluation/bench_train.py --peers_dir PEERS          # with other projects' step scripts, same geometry
    python evaluation/bench_train.py --device cuda              # parity tests, then Llama-3-8B's geometry
    python evaluation/bench_train.py --one 2048 1               # one step (S, N) in this process, one line of JSON
    python evaluation/bench_train.py --parts --target NAME      # a whole step of the demo's recipe, part by part

The step: forward and backward of the draft from random captured states, K TTT steps, the teacher included from the
target's last hidden state and head; random weights. Every token is supervised, and the target's top-1 always lies in
the draft vocabulary: the most work there can be. Optimiser and target's pass are left out, as in the peers' scripts.
Each step runs in a process of its own, on the CPU on one thread. Results are written as they come; the same command
goes on where it was stopped.

- CPU s: process time of one step, median. wall s: by the clock; on a GPU with both ends synchronised.
- peak MB: the process's largest resident memory, imports and weights included; on a GPU the largest allocation.
- before: the same just before the first step: imports, weights, inputs.
- floor: the step's matrix products (`step_flops`) at the rate of a large product of the step's shapes, measured in the
  same process right after the step; share: floor / CPU s (on a GPU / wall s).

Shapes: B batch (1), S slots, H hidden, V target vocabulary, D draft vocabulary, N draft layers, K TTT steps.
"""

import argparse
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle3_llama.configuration_eagle3_llama import Eagle3LlamaConfig
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer.hub import provenance
from eagle3_llama.trainer.loss import chain_loss
from eagle3_llama.trainer.spare_activations import spare_activations
from eagle3_llama.trainer.ttt_attention import flash_ttt_attention

ROOT = Path(__file__).parents[1]
KEYS = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
    "draft_vocab_size"
).split()
GEOMETRIES = {  # the target's layers, then what target and draft share, V, D
    "smollm2-135m": (30, 576, 1536, 9, 3, 64, 49152, 8192),
    "llama3-8b": (32, 4096, 14336, 32, 8, 128, 128256, 32000),
    "toy": (8, 32, 48, 4, 2, 8, 256, 64),
}
# Dense bf16 TFLOP/s of the data sheets. Another GPU is held against the product measured on it.
BF16_PEAK = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312}
# Of the peers' scripts, and of the wheels they run. The wheels pin other versions of torch: hence --no-deps.
SPECFORGE = "specforge==0.2.0"
SPECULATORS = (
    "speculators==0.9.0 hs-connectors==0.9.0 pydantic-settings loguru aiohttp aiohappyeyeballs aiosignal attrs "
    "frozenlist multidict propcache yarl python-dotenv protobuf httpx httpcore openai jiter distro sniffio"
).split()
OURS = "eagle3-llama"
PARTS = ("data", "target", "unroll", "loss", "backward", "optimiser")


# ---- our step ----


def draft_and_target_config(geometry: str, layers: int) -> tuple[Eagle3LlamaConfig, LlamaConfig]:
    values = dict(zip(KEYS, GEOMETRIES[geometry], strict=True))
    draft_vocab_size = values.pop("draft_vocab_size")
    target = LlamaConfig(**values, max_position_embeddings=8192)
    return Eagle3LlamaConfig.from_target(target, num_hidden_layers=layers, draft_vocab_size=draft_vocab_size), target


def random_draft(geometry: str, layers: int, dtype: torch.dtype) -> LlamaForCausalLMEagle3:
    """A draft in fp32 with random weights, a scattered vocabulary, and random embeddings of that dtype bound to it."""
    config, target_config = draft_and_target_config(geometry, layers)
    draft = LlamaForCausalLMEagle3(config)
    kept = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    draft.set_draft_vocabulary(kept - torch.arange(len(kept)), t2d)
    embeddings = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype).requires_grad_(False)
    draft.bind_target(SimpleNamespace(config=target_config, get_input_embeddings=lambda: embeddings))
    draft.ttt_attention = flash_ttt_attention
    return draft.train()


def random_inputs(draft: LlamaForCausalLMEagle3, slots: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a frozen target would give: ids [1,S], features [1,S,3H], its last state [1,S,H] and head [V,H]."""
    hidden, vocab = draft.config.hidden_size, draft.config.vocab_size
    last = torch.randn(1, slots, hidden, dtype=dtype)
    head = torch.randn(vocab, hidden, dtype=dtype).mul_(hidden**-0.5)
    # Its logits are higher by 4 in the draft vocabulary, by way of the first channel: the top-1 lies there, as it
    # nearly always does with a real corpus. Tokens whose top-1 lies elsewhere would cost less.
    last[..., 0], head[:, 0] = 1, 0
    head[draft.kept_ids(), 0] = 4
    return {
        "input_ids": torch.randint(0, vocab, (1, slots)),
        "features": torch.randn(1, slots, 3 * hidden, dtype=dtype),
        "target_states": last,
        "target_head": head,
    }


def training_step(accelerator: Accelerator, model: nn.Module, draft, inputs, steps: int, checkpoint_steps=False):
    """Forward and backward, by the calls of Eagle3Trainer; one document, every token the assistant's."""
    ids = inputs["input_ids"]
    documents = [ids.shape[1]]
    output = model(
        input_ids=ids,
        hidden_states=inputs["features"],
        documents=documents,
        ttt_steps=steps,
        checkpoint_steps=checkpoint_steps,
    )
    with accelerator.autocast():
        result = chain_loss(
            output.hidden_states,
            draft.lm_head.weight,
            inputs["target_states"],
            inputs["target_head"],
            torch.ones_like(ids),
            draft.kept_ids(),
            documents,
        )
    (result.loss / result.supervised[0]).backward()
    return result


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable, device: str) -> tuple[float, float]:
    """(wall, CPU) seconds of a call."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_mb(device: str) -> float:
    """Largest memory so far: resident, or allocated on the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    # ru_maxrss, which the peers read, begins with the size of the process that started this one. It is the same
    # as long as that was the smaller of the two, as here.
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(found[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def measure_step(args: argparse.Namespace, slots: int, layers: int) -> dict:
    """Time one step in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    with torch.device(args.device):
        draft = random_draft(args.geometry, layers, dtype)
        if not args.checkpoint_steps:  # as the trainer
            spare_activations(draft)
        inputs = random_inputs(draft, slots, dtype)
    mixed = {torch.float32: "no", torch.bfloat16: "bf16"}[dtype]
    accelerator = Accelerator(mixed_precision=mixed, cpu=args.device == "cpu")
    model = accelerator.prepare_model(draft)
    before, times = peak_mb(args.device), []
    for _ in range(args.warmup + args.iters):
        step = (accelerator, model, draft, inputs, args.ttt_steps, args.checkpoint_steps)
        times.append(timed(lambda step=step: training_step(*step), args.device))
        draft.zero_grad(set_to_none=True)
    wall_s, cpu_s = (statistics.median(column) for column in zip(*times[args.warmup :], strict=True))
    peak = peak_mb(args.device)
    parts = step_flops(draft.config, slots, args.ttt_steps)
    rate = matmul_rate(draft.config, slots, dtype, args.device)
    return {
        "engine": OURS,
        "S": slots,
        "N": layers,
        "K": args.ttt_steps,
        "geometry": args.geometry,
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "iters": args.iters,
        "tokens": slots,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_mb": peak,
        "before_mb": before,
        "parameters": sum(p.numel() for p in draft.parameters()),
        "gflop": {name: flops / 1e9 for name, flops in parts.items()},
        "matmul_gflop_s": rate / 1e9,
        "floor_s": sum(parts.values()) / rate,
        "peak_tflop_s": gpu_peak(rate / 1e9) if args.device == "cuda" else None,
    }


# ---- what is possible ----


def step_flops(config: Eagle3LlamaConfig, slots: int, steps: int) -> dict[str, int]:
    """Floating-point operations of the step's matrix products by part, forward and backward, all tokens supervised.

    A linear layer takes 2 operations a weight and slot forward and 4 backward. The flash kernel takes two products
    forward and five backward, each over half of the score matrix. Everything elementwise is left out.
    """
    hidden, layers, vocab = config.hidden_size, config.num_hidden_layers, config.draft_vocab_size
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    sizes = [hidden * (2 if i == 0 or config.embed_fusion == "all" else 1) for i in range(layers)]
    supervised = slots - 2  # a slot before the token, and a token after it
    return {
        "fc": 4 * slots * 3 * hidden * hidden,  # the captured states need no gradient
        "projections": 6 * slots * steps * sum(size * (heads + 2 * kv_heads) + heads * hidden for size in sizes),
        "MLP": 6 * slots * steps * layers * 3 * hidden * config.intermediate_size,
        "attention": 7 * slots * (slots + 1) * heads * layers * steps,
        "draft head": 6 * hidden * vocab * sum(supervised - k for k in range(steps)),
        "target head": 2 * supervised * hidden * config.vocab_size,
    }


def matmul_rate(config: Eagle3LlamaConfig, slots: int, dtype: torch.dtype, device: str) -> float:
    """The best rate, in operations a second, of the MLP's and the head's product over S slots."""
    best = 0.0
    for columns in (config.intermediate_size, config.draft_vocab_size):
        x = torch.randn(slots, config.hidden_size, dtype=dtype, device=device)
        weight = torch.randn(columns, config.hidden_size, dtype=dtype, device=device)
        # On the CPU by process time, as the step: other processes take no part in it.
        seconds = min(timed(lambda x=x, w=weight: x @ w.T, device)[device == "cpu"] for _ in range(5))
        best = max(best, 2 * x.numel() * columns / seconds)
    return best


def gpu_peak(measured_gflop_s: float) -> float:
    """Dense bf16 TFLOP/s of this GPU's data sheet, or what was measured."""
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in BF16_PEAK.items() if key in name), measured_gflop_s / 1e3)


# ---- the peers ----


def install_peers(folder: Path) -> None:
    """The peers' wheels in a folder of their own. Raises CalledProcessError when they cannot be had."""
    if (folder / "complete").exists():
        return
    print(f"peers: installing their wheels into {folder}", flush=True)
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*pip, "download", "--no-deps", "--dest", folder, SPECFORGE], check=True)
    with zipfile.ZipFile(next(folder.glob("specforge-*.whl"))) as wheel:
        wheel.extractall(folder / "specforge")
    site = folder / "speculators_site"
    subprocess.run([*pip, "install", "--no-deps", "--upgrade", "--target", site, *SPECULATORS], check=True)
    (folder / "complete").touch()


def peers(args: argparse.Namespace) -> list[str]:
    """The peers that can run; says why not."""
    scripts = {"SpecForge": "specforge_step.py", "speculators": "speculators_step.py"}
    if not args.peers_dir:
        print("peers: skipped, give PEERS=folder of their step scripts (--peers_dir)")
        return []
    if missing := [name for name in scripts.values() if not (Path(args.peers_dir) / name).exists()]:
        print(f"peers: skipped, {args.peers_dir} has no {', '.join(missing)}")
        return []
    try:
        install_peers(Path(args.peers_source))
    except subprocess.CalledProcessError as error:
        print(f"peers: skipped, their wheels cannot be installed (pip's exit status {error.returncode})")
        return []
    return list(scripts)


def command(args: argparse.Namespace, engine: str, slots: int, layers: int) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of one step."""
    counts = ["--threads", args.threads, "--warmup", args.warmup]
    if engine == OURS:
        words = [__file__, "--one", slots, layers, *counts, "--iters", args.iters, "--ttt_steps", args.ttt_steps]
        words += ["--geometry", args.geometry, "--device", args.device, "--dtype", args.dtype]
        words += ["--checkpoint_steps"] if args.checkpoint_steps else []
        environment = {}
    elif engine == "SpecForge":
        words = [f"{args.peers_dir}/specforge_step.py", "--one", *counts, "--iters", args.iters, "--seq", slots]
        words += ["--compile", "off", "--teacher", "hidden", "--dtype", "fp32", "--ttt", args.ttt_steps]
        environment = {"SPECFORGE_SRC": f"{args.peers_source}/specforge"}
    else:
        words = [f"{args.peers_dir}/speculators_step.py", *counts, "--steps", args.iters, "--seq", slots]
        words += ["--attn", "sdpa", "--dtype", "fp32", "--ttt", args.ttt_steps]
        environment = {"PYTHONPATH": f"{args.peers_source}/speculators_site"}
    environment |= {"OMP_NUM_THREADS": str(args.threads)} if args.device == "cpu" else {}
    return [sys.executable, *map(str, words)], environment


def read_cell(args: argparse.Namespace, engine: str, slots: int, layers: int, output: str) -> dict:
    """The last JSON line of a step's output, the peers' in our words."""
    found = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    if engine == OURS:
        return found
    return {
        "engine": engine,
        "S": slots,
        "N": layers,
        "K": args.ttt_steps,
        "threads": args.threads,
        "iters": args.iters,
        "wall_s": found.get("total_s", found.get("step_s")),
        "cpu_s": found["cpu_s"],
        "peak_mb": found["peak_rss_mb"],
    }


# ---- all of them ----


def plan(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(engine, S, N) in the order of measuring: what is compared stands side by side.

    The peers run with one layer: SpecForge has no more, and speculators' memory would not last.
    """
    others = peers(args) if args.device == "cpu" else []
    cells = []
    for slots in args.lengths:
        ours = [(OURS, slots, layers) for layers in args.layers]
        cells += [*ours[:1], *((engine, slots, 1) for engine in others), *ours[1:]]
    return cells


def load_results(path: Path, header: dict) -> dict:
    """Results so far; a ValueError if they are of another commit, machine or setting."""
    if not path.exists():
        return header | {"cells": []}
    results = json.loads(path.read_text())
    if changed := [key for key in header if results.get(key) != header[key]]:
        changes = ", ".join(f"{key}: {results.get(key)} -> {header[key]}" for key in changed)
        raise ValueError(f"{path} holds figures of another run ({changes}); remove it or take another --output")
    return results


def measure_all(args: argparse.Namespace, path: Path) -> dict:
    """Every cell that `path` does not hold yet, one process after another."""
    header = {key: value for key, value in provenance().items() if key != "command"}
    header |= {
        key: getattr(args, key)
        for key in "device dtype geometry ttt_steps threads warmup iters checkpoint_steps".split()
    }
    results = load_results(path, header)
    done = {(cell["engine"], cell["S"], cell["N"]) for cell in results["cells"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    for cell in plan(args):
        if cell in done:
            continue
        words, environment = command(args, *cell)
        run = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False)
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["killed, out of memory?"])[-1]
            print(f"{cell}: failed, exit status {run.returncode}: {reason}", flush=True)
            continue
        found = read_cell(args, *cell, run.stdout)
        results["cells"].append(found)
        path.write_text(json.dumps(results, indent=1))
        print(f"{cell}: {found['cpu_s']:.2f} CPU s, {found['wall_s']:.2f} s, {found['peak_mb']:.0f} MB", flush=True)
    return results


def markdown(results: dict) -> str:
    """The tables of the CPU, or of the GPU."""
    cells = {(cell["engine"], cell["N"], cell["S"]): cell for cell in results["cells"]}
    lines = gpu_table(cells) if results["device"] == "cuda" else cpu_table(cells)
    lines += ["", *flops_table([cell for cell in cells.values() if cell["engine"] == OURS])]
    return "\n".join(lines) + "\n"


def cpu_table(cells: dict) -> list[str]:
    """Times and memory, as they are and over SpecForge's and those at the shortest S."""
    lines = [
        "| step | N | S | CPU s | x SpecForge | x shortest | floor s | share | peak MB | x SpecForge | before MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    shortest = min((slots for *_, slots in cells), default=0)
    for (engine, layers, slots), cell in sorted(cells.items(), key=lambda item: (item[0][0] != OURS, item[0])):
        peer = cells.get(("SpecForge", layers, slots))
        short = cells.get((engine, layers, shortest))
        row = [engine, str(layers), str(slots), f"{cell['cpu_s']:.2f}"]
        row += [f"{cell['cpu_s'] / peer['cpu_s']:.2f}" if peer else ""]
        row += [f"{cell['cpu_s'] / short['cpu_s']:.1f}" if short else ""]
        row += [f"{cell['floor_s']:.2f}", f"{cell['floor_s'] / cell['cpu_s']:.2f}"] if engine == OURS else ["", ""]
        row += [f"{cell['peak_mb']:.0f}", f"{cell['peak_mb'] / peer['peak_mb']:.2f}" if peer else ""]
        row += [f"{cell['before_mb']:.0f}" if engine == OURS else ""]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def gpu_table(cells: dict) -> list[str]:
    """Rates, as they are and over the data sheet's and a measured product's."""
    lines = [
        "| N | S | s a step | tokens/s | peak GB | before GB | TFLOP/s | of the bf16 peak | of a product |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (_, layers, slots), cell in sorted(cells.items()):
        rate = sum(cell["gflop"].values()) / cell["wall_s"] / 1e3
        lines.append(
            f"| {layers} | {slots} | {cell['wall_s']:.3f} | {cell['tokens'] / cell['wall_s']:.0f} "
            f"| {cell['peak_mb'] / 1024:.1f} | {cell['before_mb'] / 1024:.1f} | {rate:.0f} "
            f"| {rate / cell['peak_tflop_s']:.2f} | {cell['floor_s'] / cell['wall_s']:.2f} |"
        )
    return lines


def flops_table(cells: list[dict]) -> list[str]:
    """What `step_flops` counts, in GFLOP, and the measured rate of a product."""
    names = list(cells[0]["gflop"])
    lines = [f"| N | S | {' | '.join(names)} | all, GFLOP | a product, GFLOP/s |", "|---" * (len(names) + 4) + "|"]
    for cell in sorted(cells, key=lambda cell: (cell["N"], cell["S"])):
        row = [cell["N"], cell["S"], *(f"{value:.0f}" for value in cell["gflop"].values())]
        row += [f"{sum(cell['gflop'].values()):.0f}", f"{cell['matmul_gflop_s']:.0f}"]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return lines


def figure(results: dict, path: Path) -> None:
    """Time and memory against S, both axes logarithmic."""
    # Here: each timed process would carry it.
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    on_cpu = results["device"] == "cpu"
    clock = ("cpu_s", "CPU seconds a step", 1) if on_cpu else ("wall_s", "seconds a step", 1)
    panels = (clock, ("peak_mb", "peak memory, GB", 1024))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    series = sorted({(cell["engine"] != OURS, cell["engine"], cell["N"]) for cell in results["cells"]})
    for axis, (key, label, unit) in zip(axes, panels, strict=True):
        for is_peer, engine, layers in series:
            points = sorted(
                (cell["S"], cell[key] / unit)
                for cell in results["cells"]
                if (cell["engine"], cell["N"]) == (engine, layers)
            )
            name = f"{engine}, {layers} layer{'s' * (layers > 1)}"
            style = "--s" if is_peer else "-o"
            axis.loglog(*zip(*points, strict=True), style, base=2, label=name, markersize=4)
        lengths = sorted({cell["S"] for cell in results["cells"]})
        axis.set_xticks(lengths, map(str, lengths))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="S, tokens", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run_cuda_tests() -> bool:
    """The parity tests of the CUDA kernels."""
    words = [sys.executable, "-m", "pytest", "-m", "cuda", "tests/test_ttt_attention.py", "tests/test_packing.py"]
    return subprocess.run(words, cwd=ROOT, check=False).returncode == 0


def write(args: argparse.Namespace, name: str, where: dict, text: str) -> None:
    heading = f"{where['machine']}, {where['versions']}, commit {where['commit'][:8]}"
    Path(f"{args.output}{name}.md").write_text(f"{heading}\n\n{text}")
    print(f"\n{heading}\n\n{text}")


def bench(args: argparse.Namespace) -> int:
    """All cells, table and figure. Returns the exit status."""
    good = args.device == "cpu" or run_cuda_tests()
    results = measure_all(args, Path(f"{args.output}.json"))
    if not any(cell["engine"] == OURS for cell in results["cells"]):
        print("no step of ours could be measured, see above")
        return 1
    write(args, "", results, markdown(results))
    if args.figure:
        figure(results, Path(args.figure))
    if not good:
        print("the parity tests of the CUDA kernels failed, see above: these figures mean nothing yet")
    return 0 if good else 1


# ---- a whole step, part by part ----


def synthetic_rows(path: Path, vocab_size: int, length: int) -> str:
    """A file of 200 tokenised conversations at random, 7 of 8 tokens the assistant's."""
    prompt = length // 8
    mask = [0] * prompt + [1] * (length - prompt)
    with path.open("w") as file:
        for ids in torch.randint(0, vocab_size, (200, length)).tolist():
            file.write(json.dumps({"input_ids": ids, "assistant_masks": mask}) + "\n")
    return str(path)


def make_trainer(args: argparse.Namespace, folder: str):
    """The trainer that trainer/run.py would make of the recipe."""
    # Here: they import what no timed step should carry.
    from transformers import AutoTokenizer
    from trl import TrlParser

    from eagle3_llama.trainer.eagle3_config import Eagle3Config
    from eagle3_llama.trainer.eagle3_trainer import Eagle3Trainer
    from eagle3_llama.trainer.frozen_target import load_target
    from eagle3_llama.trainer.run import ScriptArguments, load_data

    gguf = {"gguf_file": args.target_gguf_file} if args.target_gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(args.target, **gguf)
    words = ["--config", args.config, "--output_dir", folder, "--target_name_or_path", args.target]
    words += ["--target_gguf_file", args.target_gguf_file or "", "--eval_samples", "0", "--measure_prompts", "0"]
    rows = args.dataset_name or synthetic_rows(Path(folder) / "rows.jsonl", len(tokenizer), args.row_length)
    script, training = TrlParser((ScriptArguments, Eagle3Config)).parse_args_and_config(
        [*words, "--dataset_name", rows]
    )
    dataset, _ = load_data(script, training, tokenizer)
    target = load_target(args.target, dtype=script.target_dtype, **gguf)
    return Eagle3Trainer(target=target, args=training, train_dataset=dataset, processing_class=tokenizer)


def step_by_parts(trainer, model: nn.Module, optimizer, batches: Iterator[dict]) -> tuple[list[tuple], int]:
    """One training step, by the calls of Eagle3Trainer: (wall, CPU) seconds of every part, and the tokens."""
    from eagle3_llama.trainer.frozen_target import capture

    draft, target, training = trainer.draft, trainer.target, trainer.args
    laps = []

    def lap():
        synchronize(trainer.accelerator.device.type)
        laps.append((time.perf_counter(), time.process_time()))

    lap()
    batch = next(batches)
    ids, documents = batch["input_ids"], batch["documents"]
    lap()
    layers = draft.config.eagle_aux_hidden_state_layer_ids
    features, target_states = capture(target, ids, documents, layers, training.target_tokens_at_once)
    lap()
    output = model(
        input_ids=ids,
        hidden_states=features,
        documents=documents,
        ttt_steps=training.ttt_steps,
        checkpoint_steps=training.checkpoint_steps,
    )
    lap()
    with trainer.accelerator.autocast():
        result = chain_loss(
            output.hidden_states,
            draft.lm_head.weight,
            target_states,
            target.get_output_embeddings().weight,
            batch["assistant_masks"],
            draft.kept_ids(),
            documents,
        )
    lap()
    trainer.accelerator.backward(result.loss / result.supervised[0].clamp(min=1))
    lap()
    trainer.accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    lap()
    return [(wall - w, cpu - c) for (w, c), (wall, cpu) in itertools.pairwise(laps)], ids.numel()


def parts(args: argparse.Namespace) -> dict:
    """Median milliseconds, by the clock and of the CPU, of every part of the recipe's step; the tokens of a step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, folder)
    torch.set_num_threads(args.threads)
    model, optimizer = trainer.accelerator.prepare(trainer.model.train(), trainer.create_optimizer())
    batches = iter(trainer.get_train_dataloader())
    steps = [step_by_parts(trainer, model, optimizer, batches) for _ in range(args.warmup + args.iters)]
    laps, tokens = zip(*steps[args.warmup :], strict=True)
    medians = [
        [1e3 * statistics.median(column) for column in zip(*part, strict=True)] for part in zip(*laps, strict=True)
    ]
    return {
        "parts_ms": dict(zip(PARTS, (wall for wall, _ in medians), strict=True)),
        "parts_cpu_ms": dict(zip(PARTS, (cpu for _, cpu in medians), strict=True)),
        "tokens": statistics.median(tokens),
        "K": trainer.args.ttt_steps,
        "S": trainer.args.max_length,
        "bf16": trainer.args.bf16,
        "threads": args.threads,
        "steps": args.iters,
    }


def parts_markdown(found: dict) -> str:
    total = sum(found["parts_ms"].values())
    lines = [
        f"{found['tokens']:.0f} tokens a step (rows of at most {found['S']}), K = {found['K']}, "
        f"{'bf16' if found['bf16'] else 'fp32'}, {found['threads']} threads, median of {found['steps']} steps.\n",
        "| part | ms | share | CPU ms |",
        "|---|---|---|---|",
    ]
    for name, ms in found["parts_ms"].items():
        lines.append(f"| {name} | {ms:.0f} | {ms / total:.2f} | {found['parts_cpu_ms'][name]:.0f} |")
    lines.append(f"| all | {total:.0f} | 1.00 | {sum(found['parts_cpu_ms'].values()):.0f} |")
    return "\n".join(lines) + "\n"


# ---- command ----


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the training step of a draft.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--geometry", choices=GEOMETRIES, help="default smollm2-135m, on a GPU llama3-8b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default float32, on a GPU bfloat16 autocast")
    parser.add_argument("--lengths", type=int, nargs="+", help="S; default 512 1024 2048 4096, on a GPU 2048 8192")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3], help="N (default 1 2 3)")
    parser.add_argument("--ttt_steps", type=int, default=7, help="K (default 7)")
    parser.add_argument("--checkpoint_steps", action="store_true", help="with checkpoints, as the trainer's option")
    parser.add_argument("--threads", type=int, help="default 1, with --parts all cores")
    parser.add_argument("--warmup", type=int, help="untimed steps first (default 1, with --parts 3)")
    parser.add_argument("--iters", type=int, help="timed steps (default 3, with --parts 20)")
    parser.add_argument("--peers_dir", help="folder with specforge_step.py and speculators_step.py; default: no peers")
    parser.add_argument("--peers_source", default="outputs/peer-src", help="where the peers' wheels are installed")
    parser.add_argument("--output", default="outputs/bench-train", help="writes this .md and .json")
    parser.add_argument("--figure", help="PNG to write (default docs/bench-train.png on the CPU)")
    parser.add_argument("--one", type=int, nargs=2, metavar=("S", "N"), help="time one step in this process")
    parser.add_argument("--parts", action="store_true", help="time the parts of a whole training step")
    parser.add_argument("--target", help="with --parts: Hub name or folder")
    parser.add_argument("--target_gguf_file", help="GGUF file in that folder")
    parser.add_argument("--config", default=str(ROOT / "trainer/recipes/smollm2_135m.yaml"), help="with --parts")
    parser.add_argument("--dataset_name", help="with --parts: conversations; default tokens at random")
    parser.add_argument("--row_length", type=int, default=512, help="tokens of a row at random (default 512)")
    args = parser.parse_args(words)
    if args.parts and not args.target:
        parser.error("--parts needs --target")
    on_gpu = args.device == "cuda"
    defaults = {
        "geometry": "llama3-8b" if on_gpu else "smollm2-135m",
        "dtype": "bfloat16" if on_gpu else "float32",
        "lengths": [2048, 8192] if on_gpu else [512, 1024, 2048, 4096],
        "threads": torch.get_num_threads() if args.parts or on_gpu else 1,
        "warmup": 3 if args.parts else 1,
        "iters": 20 if args.parts else 3,
        "figure": None if on_gpu else "docs/bench-train.png",
    }
    for key, value in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    return args


def main() -> None:
    args = parse_arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device")
    elif args.one:
        print(json.dumps(measure_step(args, *args.one)))
    elif args.parts:
        found, where = parts(args), provenance()
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{args.output}-parts.json").write_text(json.dumps(where | found, indent=1))
        write(args, "-parts", where, parts_markdown(found))
    else:
        sys.exit(bench(args))


if __name__ == "__main__":
    main()
