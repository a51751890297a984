"""`prepare_pipeline`: tests a model's loss, and splits the model into pipeline stages."""

from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_ga.exact.rule import Rule
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.pipeline import Pipeline, split_into_stages
from hf_ga.proof.targets import prove

NUM_SAMPLES = 64  # that the test of the loss takes from the dataset


def prepare_pipeline(
    accelerator: Accelerator,
    model: PreTrainedModel,
    windows: WindowLoader,
    *,
    num_stages: int,
    schedule: str = "1f1b",
) -> Pipeline:
    """Split a model into pipeline stages, and keep this rank's stage.

    With twice (three times, ...) as many processes as stages, the model is trained in two (three,
    ...) replicas, over which each window is split. The gradient is that of the full batch for any
    number of stages, replicas and micro-batches. The first stage holds the embeddings, the last one
    the head. If they share a weight (tied embeddings), both hold a copy, which gets the sum of both
    gradients. Dropout masks are those of the full model.

    Args:
        accelerator: The accelerator of all processes.
        model: A transformers model of one of the supported classes
            (`pipeline_model.SUPPORTED_MODELS`), the same on all ranks, not prepared. It is changed
            in place: it keeps the modules of this rank's stage only, and moves to the accelerator's
            device.
        windows: The loader of the training samples. It is changed: it splits its windows over
            replicas, not over all processes.
        num_stages: Number of stages, at least 2 and at most the model's number of layers.
        schedule: "gpipe" runs all forwards of a window before its backwards; "1f1b" alternates
            between them, so that a stage keeps the activations of at most `num_stages`
            micro-batches.

    Returns:
        The pipeline. Build the optimizer on `pipeline.model.parameters()`.

    Raises:
        ConfigError: If the model, its loss or a setting is unsupported in a pipeline.
        LossNotAdditive: If the loss of a window is not the mean over its targets.
        UnkeyedRandomness: If random draws cannot be tied to samples.

    Example:
        windows = hf_ga.WindowLoader(dataset, collate_fn, accelerator=accelerator, **sizes)
        pipeline = hf_ga.prepare_pipeline(accelerator, model, windows, num_stages=2)
        optimizer = torch.optim.AdamW(pipeline.model.parameters())
        for window in windows:
            result = pipeline.train_step(optimizer, window, max_grad_norm=1.0)
    """

    def rule_of_model() -> Rule:
        """Test what the loss of the whole model averages over."""
        return prove(model, windows.probe_samples(NUM_SAMPLES), windows.collate_fn)

    return split_into_stages(
        accelerator, model, windows, rule_of_model, num_stages=num_stages, schedule=schedule
    )
