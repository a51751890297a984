"""The check on two processes: Trainer and Accelerate's loop are convicted by the names of what
several processes add, hf_ga is acquitted in the same table.
"""

import helpers
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from forked import on_two_ranks

import hf_ga
from hf_ga.check.arms import accelerate_arm, trainer_arm
from hf_ga.check.verdict.more_rows import ARM
from hf_ga.check.verdict.rows import OURS

pytestmark = pytest.mark.slow("starts processes")
AVERAGE = "average of local means"
REPEATS = "even_batches"
REDUCTION = "bf16 reduction"
# Of 12 samples; even and odd micro-batches are of different processes. In "equal" both have as many
# samples.
LAYOUTS = {"one each": [9, 3], "odd": [6, 2, 4], "equal": [6, 6]}


def report_of(kind, build, samples, **more):
    """Of the check on two processes; the same on both."""

    def work():
        torch.set_num_threads(1)
        more["steps"] = {
            "Trainer": trainer_arm(),
            "loop": accelerate_arm(),
            **more.get("steps", {}),
        }
        return hf_ga.check_equivalence(
            build(), samples, helpers.pad_right, **{"layouts": LAYOUTS} | more
        )

    first, second = on_two_ranks(work, kind)
    assert not isinstance(first, str), first
    assert [row.cells() for row in first.rows] == [row.cells() for row in second.rows]
    return first


def found(report, arm):
    """layout -> names of the causes, of the rows that were diagnosed."""
    return {
        row.layout: {cause.name for cause in row.causes}
        for row in report.arm(arm).rows
        if row.causes
    }


def right(model, micro_batches):
    """A step of one's own: this process's micro-batches, each with its share of all targets, and a
    sum over the processes.
    """
    total = sum(len(batch["labels"]) for batch in micro_batches)
    for batch in micro_batches[dist.get_rank() :: dist.get_world_size()]:
        (model(**batch).loss * len(batch["labels"]) / total).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@pytest.fixture(scope="module")
def classifier():
    """Under DDP; each sample is one target."""
    hook = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.FP16
    )  # BF16 needs a GPU
    steps = {"hook": accelerate_arm(kwargs_handlers=[hook]), "right": right}
    return report_of("ddp", helpers.bert_classifier, helpers.class_samples(12), steps=steps)


def test_ddp_convicts_trainer_and_the_loop_by_name(classifier):
    assert classifier.arm(OURS).passed, classifier
    assert found(classifier, "loop")["one each"] == {AVERAGE}, classifier
    assert found(classifier, "loop")["odd"] >= {REPEATS}, classifier
    assert found(classifier, "Trainer")["odd"] >= {REPEATS}, classifier
    assert "2 processes under DDP" in classifier.facts[-1]


def test_equal_numbers_of_targets_and_a_right_step_are_no_fault(classifier):
    """The control."""
    assert classifier.arm("right").passed, classifier
    rows = {row.layout: row for row in classifier.arm("loop").rows}
    assert rows["equal"].passed
    assert not rows["one each"].passed
    assert rows["one each"].error > 0.01


def test_a_communication_hook_in_half_precision_is_named(classifier):
    assert found(classifier, "hook")["equal"] == {"fp16 reduction"}, classifier


@pytest.mark.parametrize(
    ("kind", "precision", "reduction"), [("fsdp1", "bf16", {REDUCTION}), ("fsdp2", "fp32", set())]
)
def test_fsdp_convicts_trainer_and_the_loop_by_name(kind, precision, reduction):
    """In bf16 Accelerate also reduces in it."""
    layouts = {"odd": LAYOUTS["odd"]}
    report = report_of(
        kind,
        lambda: helpers.gpt2(0.1),
        helpers.token_samples(12),
        layouts=layouts,
        precision=precision,
    )
    assert report.arm(OURS).passed, report
    assert (
        found(report, "loop")["odd"] == {AVERAGE, REPEATS, "normalisation", "dropout"} | reduction
    ), report
    assert (
        found(report, "Trainer")["odd"]
        == {REPEATS, "labels counted unshifted", "dropout"} | reduction
    ), report
    assert f"2 processes under {kind.upper()}" in report.facts[-1]


def test_processes_with_different_models_are_refused():
    def work():
        model = helpers.bert_classifier()
        model.classifier.bias.data += PartialState(cpu=True).process_index
        return hf_ga.check_equivalence(model, helpers.class_samples(12), helpers.pad_right)

    assert all(
        "ConfigError: all processes must have the same samples and weights" in said
        for said in on_two_ranks(work)
    )


def test_pipeline_stages_have_a_row():
    """The stages pass; a model that cannot be cut, and stages without a process each, are refused."""
    layouts = {"equal": [7, 7]}
    more = {"layouts": layouts, "pipeline_stages": 2}
    samples = helpers.token_samples(14)  # 14 is no multiple of the four micro-batches
    report = report_of("ddp", lambda: helpers.gpt2(0.1), samples, **more)
    (row,) = report.arm(ARM).rows
    assert row.passed and row.error < 1e-6, report
    assert sum(row.micro_batches) == 14, row.micro_batches
    more["layouts"] = {"equal": [6, 6]}
    report = report_of("ddp", lambda: helpers.t5(0.1), helpers.token_samples(12), **more)
    assert "pipeline" in report.arm(ARM).rows[0].refused
    more["pipeline_stages"] = 3
    report = report_of("ddp", helpers.gpt2, helpers.token_samples(12), **more)
    assert report.arm(ARM).rows[0].refused


def summed_logits(outputs, batch):
    return outputs.logits.sum(), len(batch["labels"])


def test_pipeline_stages_refuse_a_loss_fn():
    """They would compute the loss of the head, and fail in comparison with another one."""
    more = {"layouts": {"equal": [6, 6]}, "pipeline_stages": 2, "loss_fn": summed_logits}
    report = report_of("ddp", helpers.gpt2, helpers.token_samples(12), **more)
    assert "unsupported loss in a pipeline" in report.arm(ARM).rows[0].refused
