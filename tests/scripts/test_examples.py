"""Command lines that transformers publishes for its example scripts, with only the script's name
replaced by --task: settings are those of the script, and the first window's loss is that of plain
PyTorch on the same rows, tokenized as the script does.

Models and datasets are tiny ones in folders with the names of the hub's, so the lines are unchanged
except for --max_steps 2 and the folder of the output. What is on the hub loads in the same way, but
needs a network.
"""

import copy
import json
import shlex
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers as tf
from runs import WORDS, without_curves
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hf_ga
from hf_ga.finetuning.run import loop
from hf_ga.finetuning.run.flags.arguments import TASK_OF_SCRIPT
from hf_ga.finetuning.run.flags.cli import parse_config
from hf_ga.order.order import epoch_order

pytestmark = pytest.mark.usefixtures("own_accelerator_state")
SPECIAL = ["<pad>", "<eos>", "<mask>", "<cls>", "<sep>", "<unk>"]
NUM_ROWS = 40
POSITIONS = 64
TAGS = ["B-LOC", "I-LOC", "O"]
CUT = {"truncation": True, "max_length": POSITIONS}
SETTINGS = """learning_rate weight_decay warmup_steps lr_scheduler_type num_train_epochs per_device_train_batch_size
    gradient_accumulation_steps max_grad_norm seed adam_beta1 adam_beta2 adam_epsilon label_smoothing_factor max_steps"""
GPT2 = "openai-community/gpt2"
BERT = "google-bert/bert-base-cased"
ROBERTA = "FacebookAI/roberta-base"
T5 = "google-t5/t5-small"
MARIAN = "Helsinki-NLP/opus-mt-en-ro"
LINES = dict(
    line.split(": ", 1)
    for line in (Path(__file__).parent / "examples.txt").read_text().splitlines()
)
OTHER = """ --adam_beta1 0.8 --adam_beta2 0.98 --adam_epsilon 1e-6 --weight_decay 0.1 --max_grad_norm 0.5 --seed 7
    --gradient_accumulation_steps 2 --max_train_samples 30 --lr_scheduler_type constant_with_warmup --warmup_steps 0.2"""
QUICK = ("run_glue", "run_ner with other settings")
LINES["run_ner with other settings"] = LINES["run_ner"] + OTHER


def words(rng, least=1, most=12):
    return rng.choice(WORDS, rng.integers(least, most)).tolist()


def text(rng, *sizes):
    return " ".join(words(rng, *sizes))


def question(i, rng):
    context = words(rng, 4, 30)
    k = int(rng.integers(0, len(context) - 1))
    answer = {
        "text": [" ".join(context[k : k + 2])],
        "answer_start": [len(" ".join([*context[:k], ""]))],
    }
    return {
        "id": str(i),
        "title": "x",
        "question": text(rng),
        "context": " ".join(context),
        "answers": answer,
    }


def tagged(i, rng):
    tokens = words(rng)
    return {"tokens": tokens, "ner_tags": [TAGS[len(word) % 3] for word in tokens]}


ROWS = {  # dataset: (configuration, what makes a row)
    "wikitext": ("wikitext-2-raw-v1", lambda i, rng: {"text": text(rng, 20, 90)}),
    "nyu-mll/glue": (
        "mrpc",
        lambda i, rng: {"sentence1": text(rng), "sentence2": text(rng), "label": i % 2, "idx": i},
    ),
    "imdb": ("default", lambda i, rng: {"text": text(rng, 1, 90), "label": i % 2}),
    "conll2003": ("default", tagged),
    "squad": ("default", question),
    "allenai/swag": (
        "regular",
        lambda i, rng: {
            "sent1": text(rng),
            "sent2": text(rng),
            **{f"ending{k}": text(rng) for k in range(4)},
            "label": i % 4,
        },
    ),
    "cnn_dailymail": (
        "3.0.0",
        lambda i, rng: {"article": text(rng, 5, 30), "highlights": text(rng), "id": str(i)},
    ),
    "wmt16": ("ro-en", lambda i, rng: {"translation": {"en": text(rng), "ro": text(rng)}}),
}


def save_dataset(folder, config, make):
    folder.mkdir(parents=True)
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "validation")]
    (folder / "README.md").write_text(
        f"---\n{json.dumps({'configs': [{'config_name': config, 'data_files': files}]})}\n---\n"
    )
    for split, count in {"train": NUM_ROWS, "validation": 4}.items():
        rng = np.random.default_rng(count)
        rows = [make(i, rng) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenizer_with(template, pair=None):
    """A word is a token, so an example is easy to follow; special tokens as in the model's kind."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS, "summarize", ":"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        special = [(token, vocabulary[token]) for token in ("<cls>", "<sep>", "<eos>")]
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=pair, special_tokens=special
        )
    names = {f"{token[1:-1]}_token": token for token in SPECIAL}
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, **names, model_max_length=POSITIONS)


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """The current folder, with models and datasets by the hub's names. Without dropout, so that
    plain PyTorch can compare.
    """
    folder = tmp_path_factory.mktemp("hub")
    for name, (config, make) in ROWS.items():
        save_dataset(folder / name, config, make)
    (folder / "texts.jsonl").write_text((folder / "wikitext" / "train.jsonl").read_text())
    sizes = {
        "vocab_size": len(SPECIAL) + len(WORDS) + 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    bart = {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    ids = {
        "vocab_size": sizes["vocab_size"],
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    t5 = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    bert = tf.BertConfig(
        **sizes,
        **off,
        intermediate_size=32,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
    )
    of_encoders = ("<cls> $A <sep>", "<cls> $A <sep> $B:1 <sep>:1")
    with pytest.MonkeyPatch.context() as patch, without_curves():
        patch.chdir(folder)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        for name, config, template in (
            (
                GPT2,
                tf.GPT2Config(
                    **sizes, **still, n_positions=POSITIONS, bos_token_id=1, eos_token_id=1
                ),
                ("",),
            ),
            (BERT, bert, of_encoders),
            (ROBERTA, bert, of_encoders),
            (T5, tf.T5Config(**t5, **ids), ("$A <eos>",)),
            (
                MARIAN,
                tf.BartConfig(**bart, **ids, dropout=0.0, forced_eos_token_id=1),
                ("$A <eos>",),
            ),
        ):
            tf.AutoModel.from_config(config).save_pretrained(name)
            tokenizer_with(*template).save_pretrained(name)
        yield folder


def samples_of(name, rows, tokenizer):
    """All samples as the script makes them, within the model's positions. hf_ga ends each text of a
    causal LM.
    """
    script = name.removesuffix(" with other settings").removesuffix("_no_trainer")
    if script in ("run_clm", "run_mlm"):
        end = [1] if script == "run_clm" else []
        ids = [
            token
            for row in rows
            for token in tokenizer(row["text"], verbose=False)["input_ids"] + end
        ]
        blocks = [ids[i : i + POSITIONS] for i in range(0, len(ids), POSITIONS)]
        return [{"input_ids": block, "labels": block} for block in blocks]
    return [sample(script, row, tokenizer) for row in rows]


def sample(script, row, tokenizer):
    if script == "run_mlm by line":
        ids = tokenizer(row["text"], **CUT)["input_ids"]
        return {"input_ids": ids, "labels": ids}
    if script.startswith("run_glue"):
        texts = [row[column] for column in ("text", "sentence1", "sentence2") if column in row]
        return {**tokenizer(*texts, **CUT), "labels": row["label"]}
    if script == "run_ner":  # one token per word
        return {
            **tokenizer(row["tokens"], is_split_into_words=True),
            "labels": [-100, *map(TAGS.index, row["ner_tags"]), -100],
        }
    if script == "run_qa":
        encoded = tokenizer(row["question"], row["context"], return_offsets_mapping=True)
        start = row["answers"]["answer_start"][0]
        ends = (start, start + len(row["answers"]["text"][0]))
        parts = zip(encoded.pop("offset_mapping"), encoded.sequence_ids(), strict=True)
        spans = [span if part == 1 else (-1, -1) for span, part in parts]
        first, last = ([span[k] for span in spans].index(ends[k]) for k in range(2))
        return {**encoded, "start_positions": first, "end_positions": last}
    if script == "run_swag":
        pairs = [row["sent1"]] * 4, [f"{row['sent2']} {row[f'ending{k}']}" for k in range(4)]
        return {**tokenizer(*pairs, **CUT, padding="max_length"), "labels": row["label"]}
    source, target = (
        row["translation"].values()
        if "translation" in row
        else ("summarize: " + row["article"], row["highlights"])
    )
    return {
        "input_ids": tokenizer(source, **CUT)["input_ids"],
        "labels": tokenizer(text_target=target)["input_ids"],
    }


def batch_of(samples):
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    samples = [{"attention_mask": [1] * len(s["input_ids"]), **s} for s in samples]
    columns = {name: [torch.tensor(s[name]) for s in samples] for name in samples[0]}
    return {
        name: torch.stack(rows)
        if rows[0].dim() != 1
        else padded(rows, padding_value=-100 if name == "labels" else 0)
        for name, rows in columns.items()
    }


SLOW = pytest.mark.slow("about 1 s for each of 15 lines")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in LINES]
)
def test_published_line(name, tmp_path, monkeypatch):
    script = name.split()[0]
    line = [*shlex.split(LINES[name].replace("/tmp", str(tmp_path))), "--max_steps", "2"]
    config = parse_config(["--task", script, *line])
    if "--do_train" in line:
        assert parse_config(["--task", TASK_OF_SCRIPT[script], *line]) == config
    published, _ = tf.HfArgumentParser(tf.Seq2SeqTrainingArguments).parse_known_args(line)
    published.max_grad_norm *= not script.endswith("_no_trainer")
    for setting in SETTINGS.split():
        assert getattr(config, setting) == getattr(published, setting), setting
    seen = []

    def train_step(accelerator, model, optimizer, window, **more):
        if not seen:
            groups = [
                {k: v for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            ]
            seen.extend([type(model)(copy.deepcopy(model.config)), groups, window])
            seen[0].load_state_dict(model.state_dict())
        return hf_ga.train_step(accelerator, model, optimizer, window, **more)

    monkeypatch.setattr(loop, "train_step", train_step)
    hf_ga.finetune(config)
    plain, groups, window = seen
    size = published.per_device_train_batch_size * published.gradient_accumulation_steps
    of_adam = ((published.adam_beta1, published.adam_beta2), published.adam_epsilon)
    assert {(g["betas"], g["eps"]) for g in groups} == {of_adam}
    assert [g["weight_decay"] for g in groups] == [published.weight_decay, 0.0]
    file = Path(config.dataset_name, "train.jsonl" if config.dataset_name in ROWS else "")
    rows = [json.loads(row) for row in file.read_text().splitlines()][: config.max_train_samples]
    samples = samples_of(name, rows, tf.AutoTokenizer.from_pretrained(config.model_name_or_path))
    first, others = np.split(epoch_order(len(samples), published.seed, 0), [size])
    batch, other_batch = (batch_of([samples[i] for i in ids]) for ids in (first, others))
    if script.startswith("run_mlm"):  # the masks are those of hf_ga, the texts are not
        (micro_batch,) = window.micro_batches
        batch, texts = micro_batch.batch, batch["input_ids"]
        unmasked = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        assert sorted(unmasked.tolist()) == sorted(texts.tolist())
    lines = [
        json.loads(row)
        for row in (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    ]
    loss, other = (plain.eval()(**b).loss.item() for b in (batch, other_batch))
    assert lines[0]["loss"] == pytest.approx(loss, rel=1e-5) != other
    shares = (
        [0, 1] if published.warmup_steps else [1, 0.5]
    )  # of two steps; a fraction of them is rounded up, as by Trainer
    assert [row["learning_rate"] for row in lines] == pytest.approx(
        [published.learning_rate * share for share in shares]
    )
    assert sum(map(len, window.micro_batches)) == size
