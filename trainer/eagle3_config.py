"""Options of the distillation: what TRL's configurations have, and the draft's own."""

from dataclasses import dataclass, field

from trl.trainer.base_config import _BaseConfig


@dataclass
class Eagle3Config(_BaseConfig):
    """Configuration of `Eagle3Trainer`: transformers' `TrainingArguments` with other defaults, and the fields below.

    Raises:
        ValueError: `ttt_steps` or `max_length` that leave nothing to learn.
    """

    # ---- the draft, when none is given ----
    num_hidden_layers: int = field(default=1, metadata={"help": "Layers of the draft, at least 1."})
    embed_fusion: str = field(
        default="first",
        metadata={"help": "Which layers read the token embeddings.", "choices": ["first", "all"]},
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Rows of the draft's head. Default: min(32000, the target's vocabulary)."}
    )
    captured_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "Three entries of the target's hidden_states, ascending. Default: 2, n//2, n-3 of n layers."
        },
    )
    fc_norm: bool = field(default=False, metadata={"help": "Normalise each captured state (EAGLE-3.1)."})
    norm_output: bool = field(
        default=False, metadata={"help": "Hand the normed state to the next draft step (EAGLE-3.1)."}
    )
    init_layers: bool = field(
        default=False, metadata={"help": "Start fc and layers from the target's last layers, not at random."}
    )
    target_name: str | None = field(
        default=None,
        metadata={"help": "The target's name on the Hub, for the card, where the target is loaded from a folder."},
    )

    # ---- data and loss ----
    max_length: int = field(default=2048, metadata={"help": "Tokens of a row; longer conversations are cut."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise the data."})
    ttt_steps: int = field(default=7, metadata={"help": "Steps K of the training-time test."})

    # ---- other defaults than TRL's ----
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Gradients are clipped to this norm."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Shape of the learning rate after warm-up."})
    warmup_steps: float = field(default=0.015, metadata={"help": "Warm-up: steps, or below 1 their share of all."})
    gradient_checkpointing: bool | None = field(default=None, metadata={"help": "Not available for the draft."})
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "Keep it false: the loss reads the head outside of forward, unseen by DDP."},
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "The trainer prepares its own columns."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide a non-finite loss. It stops the training here instead."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.ttt_steps < 1:
            raise ValueError(f"ttt_steps is {self.ttt_steps}; at least 1 step is trained")
        if self.max_length < 2 + self.ttt_steps:
            raise ValueError(
                f"max_length {self.max_length} leaves no slot for {self.ttt_steps} steps; raise it to "
                f"{2 + self.ttt_steps} or more"
            )
        if self.hub_strategy not in ("every_save", "end"):
            raise ValueError(
                f"hub_strategy is {self.hub_strategy.value!r}; allowed are 'every_save' and 'end': drafts only"
            )
        if self.gradient_checkpointing:
            raise ValueError("gradient_checkpointing is not available for the draft; set it to false")
