"""tau while training: the prompts it is measured on, and the end of a training whose tau falls."""

import logging
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState

from eagle3_llama.trainer.conversations import held_out_prompts
from eagle3_llama.trainer.eagle3_config import Eagle3Config

logger = logging.getLogger(__name__)


def find_tau_prompts(dataset: Dataset | None, args: Eagle3Config) -> list[list[int]]:
    """The first held-out prompts. Raises ValueError when there is none."""
    prompts = held_out_prompts(dataset or [], args.eval_tau_prompts, args.eval_tau_prompt_length)
    if not prompts:
        raise ValueError(
            f"eval_tau_prompts is {args.eval_tau_prompts}, but no held-out prompt has at most eval_tau_prompt_length "
            f"{args.eval_tau_prompt_length} tokens: raise it, or give an eval_dataset (--eval_samples)"
        )
    return prompts


class StopWhenTauFalls(TrainerCallback):
    """Ends the training after `patience` evaluations in a row without a better tau.

    transformers' EarlyStoppingCallback counts in memory, and starts again when a run is resumed. This one reads the
    logged history, which the checkpoints hold; a run that had stopped stops again before it evaluates or saves.
    """

    def __init__(self, patience: int):
        self.patience = patience

    def fell(self, args: Eagle3Config, state: TrainerState) -> bool:
        name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
        taus = [entry[name] for entry in state.log_history if name in entry]
        return len(taus) > self.patience and max(taus[-self.patience :]) <= max(taus[: -self.patience])

    def on_evaluate(self, args: Eagle3Config, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.fell(args, state):
            logger.warning("%s fell: stopping at step %d", args.metric_for_best_model, state.global_step)
            control.should_training_stop = True

    def on_step_end(self, args: Eagle3Config, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.fell(args, state):
            control.should_training_stop = True
            control.should_log = control.should_evaluate = control.should_save = False

    on_epoch_end = on_step_end
