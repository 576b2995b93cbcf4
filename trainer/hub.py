"""The draft's way to the Hub: its card, and pushing exactly the files that belong to it."""

import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from huggingface_hub import CommitInfo, upload_folder
from transformers.utils.hub import PushInProgress

if TYPE_CHECKING:
    from eagle3_llama.trainer.eagle3_trainer import Eagle3Trainer

logger = logging.getLogger(__name__)

# Whole names: the client's patterns also match inside folders, and checkpoints hold optimiser states.
DRAFT_FILES = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json|README\.md|acceptance\.json|\w+\.py|custom_generate/\w+\.py"
    r"|(model|adapter_model)[\w-]*\.safetensors(\.index\.json)?"
)
RECIPE = (
    "learning_rate lr_scheduler_type warmup_steps adam_beta1 adam_beta2 weight_decay max_grad_norm max_length "
    "ttt_steps per_device_train_batch_size gradient_accumulation_steps max_steps num_train_epochs seed bf16"
).split()


def is_hub_name(name: str | None) -> bool:
    """Whether this is `owner/name` and not a folder here; the Hub refuses cards that point to folders."""
    return bool(name) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not os.path.exists(name)


def machine() -> str:
    """What the figures were measured on, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if os.path.exists("/proc/cpuinfo")
        else None
    )
    return f"{model[1] if model else platform.machine()}, {torch.get_num_threads()} cores"


def provenance() -> dict[str, str]:
    """What every published figure carries: command, machine, versions and commit."""
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False).stdout
    # Names of folders here mean nothing elsewhere.
    words = [Path(word).name if os.path.exists(word) else word for word in sys.argv]
    return {
        "command": shlex.join(["python", *words]),
        "machine": machine(),
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "commit": commit.strip() or "unknown",
    }


def write_card(trainer: "Eagle3Trainer", folder: str) -> None:
    """Render hub_card.md into `folder`/README.md from what the trainer knows and `trainer.card`."""
    facts, draft = trainer.card, trainer.draft.config._name_or_path
    names = facts.get("datasets", [])
    Path(folder).mkdir(parents=True, exist_ok=True)
    trainer.draft.write_card(
        folder,
        repo=trainer.hub_model_id or str(trainer.args.output_dir),
        datasets=[name for name in names if is_hub_name(name)],
        adapted_draft=draft if trainer.model is not trainer.draft else None,
        revision=facts.get("target_revision"),
        target_adapter=facts.get("target_adapter"),
        coverage=facts.get("coverage"),
        measured=facts.get("measured"),
        steps=trainer.state.global_step,
        data=", ".join(Path(name).name if os.path.exists(name) else name for name in names),
        recipe={key: plain(getattr(trainer.args, key)) for key in RECIPE},
        **provenance(),
    )


def plain(value: object) -> object:
    """An option as it stands in a recipe."""
    return value.value if isinstance(value, Enum) else value


def push_draft(trainer: "Eagle3Trainer", folder: str, message: str, blocking: bool) -> CommitInfo | Future | None:
    """Push the draft in `folder` to the trainer's repo; without `blocking` in the background, skipped while one runs.

    Raises:
        RuntimeError: the Hub refused or was lost; says what is on disk and how to push it again.
    """
    repo = trainer.hub_model_id or trainer.args.hub_model_id or Path(trainer.args.output_dir).absolute().name
    names = (str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    files = sorted(name for name in names if DRAFT_FILES.fullmatch(name))
    again = f"hf upload {repo} {folder} . " + " ".join(f"--include {name}" for name in files)
    advice = f"the draft is complete in {folder}; push it by the same command, which trains no step twice, or: {again}"
    try:
        if trainer.hub_model_id is None:  # the trainer was made without push_to_hub
            trainer.init_hf_repo()
            repo = trainer.hub_model_id
        if not blocking and trainer.push_in_progress is not None and not trainer.push_in_progress.is_done():
            return None
        trainer._finish_current_push()
        done = upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=message,
            token=trainer.args.hub_token,
            revision=trainer.args.hub_revision,
            allow_patterns=files,
            run_as_future=not blocking,
        )
    except Exception as error:  # whatever the Hub's client raises: the user's result and the way out come first
        raise RuntimeError(f"pushing to {repo} failed ({type(error).__name__}: {error}); {advice}") from error
    if not blocking:
        trainer.push_in_progress = PushInProgress([done])
        done.add_done_callback(lambda future: _warn_of_failure(future, repo, advice))
    return done


def _warn_of_failure(future: Future, repo: str, advice: str) -> None:
    """A failed background push is otherwise silent (transformers 5.24); training goes on."""
    if error := future.exception():
        logger.warning("pushing to %s failed (%s: %s); %s", repo, type(error).__name__, error, advice)
