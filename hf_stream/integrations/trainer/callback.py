"""StreamingCheckpointCallback: what a user of Trainer adds, and which trainings it takes on."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.utils.import_utils import is_sagemaker_mp_enabled

from hf_stream.checkpoint.mapping import check_layout
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.errors import CheckpointError, LayoutError
from hf_stream.integrations.trainer.hooks import hook_for
from hf_stream.integrations.trainer.place import clear_leftovers
from hf_stream.integrations.trainer.settings import Settings
from hf_stream.integrations.trainer.weights import layout_to_file, who_saves
from hf_stream.layouts.composable import TwoWay, is_two_way
from hf_stream.lazy.given import kind
from hf_stream.storage.durability import is_durable
from hf_stream.utils.sizes import nbytes_of

# As accelerate calls them.
_SHARDED = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}


class StreamingCheckpointCallback(TrainerCallback):
    """Have a Trainer save and resume its checkpoints through hf_stream.

        trainer = Trainer(..., callbacks=[StreamingCheckpointCallback()])
        trainer.train(resume_from_checkpoint=True)

    Weights are written straight from the model's memory, in any layout; the states of optimizer, scheduler, gradient
    scaler and random generators in safetensors files, without pickle. A checkpoint's directory appears when all of it
    is there, and goes in one step, whenever the process is killed or power is lost. Resuming, and loading the best
    model, go back through the same layout and through transformers' own conversions into the model's parameters, where
    they are; a weight that is missing or left over is an error. Checkpoints of a Trainer without this callback can be
    resumed.

    All else is as the training arguments say: when to save, how many checkpoints to keep, what to push. Adapters (PEFT)
    and quantized models are saved and loaded by their own libraries.

    Args:
        layout: Maps the tensors that `save_pretrained` would write to those to save. It needs an inverse.
        max_shard_size: Bytes, or a string such as "5GB", for the weights.
        durable: Whether a checkpoint is on the disk, so that it outlives a loss of power, before it counts as saved and
            older ones go. None: yes, unless the environment has HF_STREAM_DURABLE=0.
        buffer_size: Bytes in flight, at most, also as text such as "64MB".
        progress: True for a bar in bytes at each checkpoint, None for a bar on terminals only, False for none.

    Raises:
        ArgumentError, ArgumentTypeError: An argument is not what it must be.
        LayoutError: The layout has no inverse.
    """

    def __init__(
        self,
        layout: TwoWay | None = None,
        *,
        max_shard_size: int | str = "50GB",
        durable: bool | None = None,
        buffer_size: int | str = DEFAULT_BUFFER_SIZE,
        progress: bool | Progress | None = False,
    ) -> None:
        check_layout(layout)
        if layout is not None:
            if not is_two_way(layout):
                raise LayoutError(
                    f"layout= must have an inverse, which resuming needs, got {kind(layout)}; pass a Layout"
                )
            layout.inverse  # noqa: B018, says what cannot be inverted
        # Not only when the first checkpoint is saved.
        nbytes_of(max_shard_size, "max_shard_size")
        is_durable(durable)
        self.settings = Settings(layout, max_shard_size, durable, nbytes_of(buffer_size, "buffer_size"), progress)
        hook_for(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Hyperparameter search copies callbacks, and pickles them.
        vars(self).update(state)
        hook_for(self)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot be saved this way while nothing is lost, and remove what a killed run has left."""
        self._check(kwargs.get("model"))
        if args.should_save:
            clear_leftovers(args.output_dir)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the model that is trained: `model_init` may have made another one."""
        self._check(kwargs.get("model"))

    def _check(self, model: Any) -> None:
        # Trainer needs it, and has seen to it that it is there.
        from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

        kind = _SHARDED.get(AcceleratorState().distributed_type.value)
        if is_sagemaker_mp_enabled():
            kind = "SageMaker model parallelism"
        if getattr(model, "is_distributed_loading_by_transformers", False):
            kind = "a model that is sharded over ranks"
        if kind is not None:
            raise CheckpointError(
                f"StreamingCheckpointCallback cannot save under {kind} yet; leave the callback out, "
                "or train in one process or with data parallelism"
            )
        saver = who_saves(model)
        if saver is not None and self.settings.layout is not None:
            raise LayoutError(f"a layout cannot be combined with {saver}; leave layout= out")
        layout_to_file(model, self.settings)
