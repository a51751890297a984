"""Load the tokenizer, the configuration and the model that `model_name_or_path` names; without a
name, create small ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch
from accelerate import init_empty_weights
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_ga.embedding.layout import saved_pooling
from hf_ga.embedding.model import EmbeddingModel
from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.run import Setup

# Model types whose position ids start at pad_token_id + 1: RoBERTa's 514 position embeddings are
# for 512 tokens.
POSITIONS_AFTER_PADDING = {
    "camembert",
    "data2vec-text",
    "ibert",
    "longformer",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}


def load_tokenizer(config: FinetuneConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model that a run fine-tunes.

    Args:
        config: The configuration of the run.

    Returns:
        The tokenizer that `model_name_or_path` names. Without this flag, the one that was trained
        on the corpus in this package (sources of Python's standard library).

    Raises:
        ConfigError: If the tokenizer cannot be loaded, or has neither a padding nor an end-of-text
            token.
    """
    if config.model_name_or_path is None:
        return corpus.load_stdlib_tokenizer()
    with _loading("tokenizer", config):
        tokenizer = AutoTokenizer.from_pretrained(
            config.model_name_or_path, trust_remote_code=config.trust_remote_code
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {config.model_name_or_path} has neither a padding nor an "
            "end-of-text token: set one."
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_byte_level = isinstance(getattr(backend, "pre_tokenizer", None), ByteLevel)
    if config.task == "token-classification" and is_byte_level:
        # Words need a space before them. RoBERTa's tokenizer class requires this argument for text
        # that is split into words.
        tokenizer = AutoTokenizer.from_pretrained(
            config.model_name_or_path,
            trust_remote_code=config.trust_remote_code,
            add_prefix_space=True,
        )
        tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    return tokenizer


def load_base_config(config: FinetuneConfig) -> PretrainedConfig | None:
    """Load the transformers configuration of the model that a run fine-tunes, without its weights.

    Args:
        config: The configuration of the run.

    Returns:
        The configuration, or None without `model_name_or_path`.

    Raises:
        ConfigError: If the configuration cannot be loaded.
    """
    if config.model_name_or_path is None:
        return None
    with _loading("model", config):
        return AutoConfig.from_pretrained(
            config.model_name_or_path, trust_remote_code=config.trust_remote_code
        )


def known_labels(model_config: PretrainedConfig | None) -> list[str] | None:
    """Return the names of the classes that the pretrained classifier of a run predicts, in the
    order of their ids, from its configuration.

    Args:
        model_config: The configuration of a pretrained model, or None for a new model.

    Returns:
        The names, or None if there are only transformers' default names LABEL_0, LABEL_1, ...
    """
    id2label = dict(getattr(model_config, "id2label", None) or {})
    labels = [str(id2label[label_id]) for label_id in sorted(id2label)]
    default_labels = [f"LABEL_{i}" for i in range(len(labels))]
    return None if labels == default_labels else labels


def complete_config(
    base_config: PretrainedConfig | None, config: FinetuneConfig, data: PreparedData
) -> PretrainedConfig:
    """Set labels and padding token in the configuration of the model to fine-tune, and check that
    the run's task, lengths and tokenizer fit the model.

    Args:
        base_config: The configuration of the pretrained model, changed in place. None: create that
            of the task's small default model.
        config: The configuration of the run.
        data: The prepared data. Its labels are set from the model if it has none.

    Returns:
        The configuration of the model to load or create.

    Raises:
        ConfigError: If the model's architecture cannot do the task, samples are longer than its
            number of positions, or token ids are beyond its vocabulary.
        DataError: If an evaluation has labels that the model was not trained on.
    """
    model_config = base_config
    if model_config is None:
        tokenizer = data.tokenizer
        model_config = data.task.small_config(
            vocab_size=len(tokenizer),
            max_position_embeddings=max(256, config.sequence_length),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            decoder_start_token_id=tokenizer.eos_token_id,
        )
    for first_mistake in _mistakes_in_model(model_config, config, data):
        raise ConfigError(first_mistake)
    _set_labels(model_config, config, data)
    pad_token_id = data.tokenizer.pad_token_id
    # torch.nn.Embedding refuses a padding index beyond its rows; then `_add_rows` sets it later.
    is_in_vocabulary = pad_token_id not in new_token_ids(model_config, data.tokenizer)
    if getattr(model_config, "pad_token_id", None) is None and is_in_vocabulary:
        model_config.pad_token_id = pad_token_id
    return model_config


def _mistakes_in_model(
    model_config: PretrainedConfig, config: FinetuneConfig, data: PreparedData
) -> Iterator[str]:
    """Yield an error message for each reason why the model cannot do the task of a run: its
    architecture, its number of positions, or its vocabulary.
    """
    model_type = model_config.model_type
    # transformers has a masked LM head for encoders and some models that are both.
    has_masked_lm_head = type(model_config) in MODEL_FOR_MASKED_LM_MAPPING
    is_decoder = model_config.is_encoder_decoder or getattr(model_config, "is_decoder", False)
    if config.task == "causal-lm" and has_masked_lm_head and not is_decoder:
        yield (
            f"{model_type} is an encoder and attends to the tokens that causal-lm predicts: use "
            "--task masked-lm, a decoder, or is_decoder true in its config.json."
        )
    if config.task == "seq2seq" and not model_config.is_encoder_decoder:
        yield (
            f"seq2seq needs an encoder with a decoder, such as T5 or BART; {model_type} has only "
            "one of them: use another model, or train a decoder on prompts with completions with "
            "--task causal-lm."
        )
    limit = num_positions(model_config) or inf
    if config.sequence_length > limit:
        flag = "block_size" if config.block_size else "max_length"
        yield (
            f"{flag} {config.sequence_length} is beyond the {limit} positions of the model: use "
            f"at most {limit}."
        )
    generates = config.task == "seq2seq" and (config.predict_file or config.predict_with_generate)
    if generates and config.max_new_tokens >= limit:
        yield (
            f"max_new_tokens {config.max_new_tokens} must be below the {limit} positions of the "
            "model."
        )
    new_ids = new_token_ids(model_config, data.tokenizer)
    if new_ids and not config.resize_token_embeddings:
        last_id = new_ids[-1]
        last_token = data.tokenizer.convert_ids_to_tokens(last_id)
        yield (
            f"the tokenizer has {len(data.tokenizer)} tokens (the last, {last_token!r}, has id "
            f"{last_id}), but the model has {new_ids.start}: use the model's tokenizer, or add "
            "rows for the new tokens with --resize_token_embeddings."
        )


def num_positions(model_config: PretrainedConfig | None) -> int | None:
    """Return the maximum number of tokens in a sample for which the model to fine-tune has position
    embeddings. It bounds flags such as `max_length`.

    Args:
        model_config: The configuration of the model; None for the small default model, which is
            created long enough.

    Returns:
        The number of tokens, or None without a limit.
    """
    limit = getattr(model_config, "max_position_embeddings", None)
    if model_config and limit and model_config.model_type in POSITIONS_AFTER_PADDING:
        limit -= (model_config.pad_token_id or 0) + 1
    return limit


def new_token_ids(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> range:
    """Return the ids of the tokenizer's tokens that are beyond the model's vocabulary: the token
    embeddings have no rows for them, unless the flag `resize_token_embeddings` adds them.
    """
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    largest_id = max(tokenizer.get_vocab().values(), default=0)
    num_ids = max(largest_id + 1, len(tokenizer))
    return range(vocab_size or num_ids, num_ids)


def _set_labels(model_config: PretrainedConfig, config: FinetuneConfig, data: PreparedData) -> None:
    """Set in the configuration of the model to fine-tune, in place, the number of outputs of its
    classification head, the names of the labels and the loss.
    """
    if config.task == "question-answering":
        model_config.num_labels = 2  # logits of the first and of the last token
    # One output for each label (regression: one output).
    if data.task.labels not in ("class", "number", "classes", "tags"):
        return
    if config.eval_only:
        _check_trained_labels(model_config, config, data)
    if config.task == "regression":
        model_config.num_labels = 1
    elif data.labels:
        model_config.num_labels = len(data.labels)
        model_config.id2label = dict(enumerate(data.labels))
        model_config.label2id = {name: index for index, name in enumerate(data.labels)}
    else:
        data.labels = [str(model_config.id2label[i]) for i in range(model_config.num_labels)]
    # Replaces that of a pretrained head.
    model_config.problem_type = data.task.problem_type


def _check_trained_labels(
    model_config: PretrainedConfig, config: FinetuneConfig, data: PreparedData
) -> None:
    """Check for a run with `eval_only` that the labels of the rows are those that the model was
    trained on, by their names or their ids. No check if the model has no names of labels.
    """
    trained = known_labels(model_config)
    if not trained:
        return
    trained_ids = [str(i) for i in range(len(trained))]
    if data.labels in (trained, trained_ids):
        return
    raise DataError(
        f"eval_only: the rows have the labels {', '.join(data.labels)}, but "
        f"{config.model_name_or_path} was trained on {', '.join(trained)}. Use its names, remove "
        "other rows, or train it on them."
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block, in which a run loads its model, let transformers log errors only: not, for
    example, its report of new weights, which is pages long.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def compute_dtype(setup: Setup) -> torch.dtype:
    """Return the dtype of matrix products in a run: bfloat16 or float16 under Accelerate's mixed
    precision, float32 without it.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(setup.accelerator.mixed_precision, torch.float32)


def loading_dtype(setup: Setup) -> torch.dtype:
    """Return the dtype in which a run loads pretrained weights.

    It is float32. Only weights that are frozen under adapters keep the dtype of their checkpoint,
    if autocast computes in that dtype, too.
    """
    autocast_dtype = compute_dtype(setup)
    if setup.config.has_adapters and setup.dtype == autocast_dtype:
        return autocast_dtype
    return torch.float32


def load_model(
    setup: Setup, dtype: torch.dtype | None = None, *, is_empty: bool = False
) -> tuple[PreTrainedModel | EmbeddingModel, list[str]]:
    """Load the pretrained model of a run with the head of its task (for embeddings, its pooling),
    or create the small default model. With `resize_token_embeddings`, add embeddings for new
    tokens.

    New weights are drawn from torch's global generator: seed it first.

    Args:
        setup: The setup of the run.
        dtype: The dtype of pretrained weights. Default: `loading_dtype(setup)`.
        is_empty: Whether to leave the parameters on the meta device, without weights: for FSDP
            ranks that receive their shards from the main process.

    Returns:
        The model, and the names of parameters that are new because the checkpoint lacks them.

    Raises:
        ConfigError: If the weights cannot be loaded, an evaluation has no trained head, or the
            model does not support gradient checkpointing.
    """
    config = setup.config
    auto_class = setup.data.task.auto_class
    new_weights: list[str] = []
    if is_empty:
        with init_empty_weights():
            model = auto_class.from_config(
                setup.model_config,
                dtype=loading_dtype(setup),
                trust_remote_code=config.trust_remote_code,
            )
            _add_rows(model, setup, mean_resizing=False)
        # `init_empty_weights` replaced each name of a tied parameter by a parameter of its own.
        model.tie_weights()
    elif config.model_name_or_path is None:
        model = auto_class.from_config(setup.model_config)
    else:
        model, new_weights = _load_pretrained(setup, dtype or loading_dtype(setup))
        _check_new_weights(model, new_weights, config)
        _add_rows(model, setup)
    return _configure(model, config), new_weights


def _load_pretrained(setup: Setup, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """Load the pretrained model of a run with the head of its task, and return it with the names of
    the parameters that the checkpoint lacks.
    """
    config = setup.config
    quantization_config = None
    if config.load_in_4bit:
        quantization_config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute_dtype(setup),
        )
    with _loading("model", config), quiet_transformers():
        model, loading_info = setup.data.task.auto_class.from_pretrained(
            config.model_name_or_path,
            config=setup.model_config,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            # A head whose shape does not fit the labels is replaced, where there are labels.
            ignore_mismatched_sizes=setup.data.task.labels not in ("none", "target", "pairs"),
            output_loading_info=True,
            quantization_config=quantization_config,
        )
    missing = list(loading_info["missing_keys"])
    mismatched = [key[0] for key in loading_info["mismatched_keys"]]
    new_weights = sorted(missing + mismatched)
    if config.task == "embedding":
        # EmbeddingModel does its own pooling and does not use the encoder's pooler.
        new_weights = [name for name in new_weights if not name.startswith("pooler.")]
    return model, new_weights


def _configure(model: PreTrainedModel, config: FinetuneConfig) -> PreTrainedModel | EmbeddingModel:
    """Complete the loaded model of a run: set the loss of a causal LM, switch on gradient
    checkpointing if its flag is set, and for `--task embedding` wrap the encoder with its pooling.
    """
    # transformers finds no loss by the class name GPT2LMHeadModel, warns, and uses this one.
    if config.task == "causal-lm" and model.loss_type is None:
        model.loss_type = "ForCausalLM"
    if config.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"{type(model).__name__} does not support gradient checkpointing: omit "
                "--gradient_checkpointing."
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.task != "embedding":
        return model
    pooling = config.pooling
    if pooling is None and config.model_name_or_path is not None:
        pooling = saved_pooling(config.model_name_or_path)
    return EmbeddingModel(
        model,
        pooling or "mean",
        temperature=config.initial_temperature if config.learn_temperature else None,
        max_length=config.max_length,
    )


def _add_rows(model: PreTrainedModel, setup: Setup, *, mean_resizing: bool = True) -> None:
    """Carry out the flag `resize_token_embeddings`: add rows to the token embeddings, in place, so
    that every token of the tokenizer has one, and set the padding token if the model has none.
    """
    tokenizer = setup.data.tokenizer
    new_ids = new_token_ids(setup.model_config, tokenizer)
    if not (new_ids and setup.config.resize_token_embeddings):
        return
    with quiet_transformers():
        model.resize_token_embeddings(new_ids.stop, mean_resizing=mean_resizing)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id


def _check_new_weights(
    model: PreTrainedModel, new_weights: list[str], config: FinetuneConfig
) -> None:
    """Check that a run will train the weights that the checkpoint of its model lacks, which are
    random. With `eval_only`, nothing is trained, and layers quantized to 4 bits are frozen.
    """
    if config.eval_only and new_weights:
        raise ConfigError(
            f"eval_only: {config.model_name_or_path} has no trained head for {config.task}; new "
            f"weights would be: {', '.join(new_weights[:3])}. Train it first."
        )
    quantized = []
    for name in new_weights:
        module = model.get_submodule(name.rpartition(".")[0])
        # Only bitsandbytes' 4-bit layers have this attribute.
        if hasattr(module, "compute_dtype"):
            quantized.append(name)
    if quantized:
        raise ConfigError(
            f"load_in_4bit would freeze weights that {config.model_name_or_path} lacks: "
            f"{', '.join(quantized[:3])}. Name a model that has them, or omit load_in_4bit."
        )


@contextmanager
def _loading(what: str, config: FinetuneConfig) -> Iterator[None]:
    """Turn an error of the block, in which transformers loads a tokenizer or model to fine-tune,
    into a ConfigError with its first line.
    """
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigError(
            f"cannot load the {what} of model_name_or_path {config.model_name_or_path!r}: {reason} "
            "Give a hub id or a folder that save_pretrained wrote."
        ) from error
