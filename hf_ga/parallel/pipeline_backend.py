"""How the ranks of a pipeline communicate in a window, besides what torch's schedule sends.

The ranks are a grid of replicas x stages. Those of one stage hold the same parameters and sum their
gradients; those of one replica hold the whole model and share the norm of its gradient.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hf_ga.errors import ConfigError
from hf_ga.exact.backend import Backend, RankStatus, sum_gradients, sum_over_ranks
from hf_ga.exact.engine import FILLER_INDEX
from hf_ga.exact.hooks import Call
from hf_ga.exact.loss import Loss
from hf_ga.exact.window import Window


class PipelineBackend(Backend):
    """Replicas x stages; rank = replica * num_stages + stage.

    Args:
        accelerator: The accelerator of all ranks.
        num_stages: Number of ranks of one replica.
        min_calls: Smallest number of micro-batches that the schedule can run, if it gets any.

    Attributes:
        stages: Process group of the stages of this replica.
        replicas: Process group of the replicas of this stage.
        stage: Number of this rank's stage, from 0.
        num_stages: Number of stages.
        replica: Number of this rank's replica, from 0.
        num_replicas: Number of replicas.
        tied: A parameter that the first and the last stage both hold a copy of. None: there is
            none.

    Raises:
        ConfigError: If the number of processes is no multiple of the number of stages.
    """

    is_sharded = True
    can_overlap_all_reduce = False
    reason_not_to_split = (
        "In a pipeline it cannot be cut, as a stage that fails cannot rejoin the others: make it "
        "smaller (per_device_batch_size; the results stay the same)"
    )

    def __init__(self, accelerator: Accelerator, num_stages: int, min_calls: int) -> None:
        super().__init__(accelerator)
        self.num_stages = num_stages
        self.num_replicas, rest = divmod(self.num_processes, num_stages)
        if rest or not self.num_replicas:
            raise ConfigError(
                f"{num_stages} pipeline stages need a multiple of {num_stages} processes, got "
                f"{self.num_processes}: launch with --num_processes {num_stages}, or twice as many "
                "for two replicas."
            )
        mesh = init_device_mesh(
            self.device.type,
            (self.num_replicas, num_stages),
            mesh_dim_names=("replicas", "stages"),
        )
        self.stages = mesh.get_group("stages")
        self.replicas = mesh.get_group("replicas")
        self.replica, self.stage = divmod(self.process_index, num_stages)
        self.min_calls = min_calls
        self.tied: nn.Parameter | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the embeddings."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the head, and computes the loss."""
        return self.stage == self.num_stages - 1

    def backward(self, term: Tensor | float, weight: int) -> None:
        """Do nothing: torch's schedule runs the backward."""

    def equalize_calls(self, window: Window, calls: list[Call], loss: Loss) -> list[Call]:
        """Repeat the first call with weight 0 up to the fewest that the schedule can run."""
        missing = self.min_calls - len(calls)
        if not calls or missing <= 0:
            return calls
        filler = replace(calls[0], weight=0, index=FILLER_INDEX)
        return calls + [filler] * missing

    def all_reduce_status(self, status: RankStatus) -> RankStatus:
        """Sum the status over all ranks: targets once a replica, parameters once a stage."""
        counts = status.counts if self.is_last else (0,) * len(status.counts)
        total = super().all_reduce_status(replace(status, counts=counts, has_gradient=()))
        if not status.has_gradient:
            return total
        has_gradient = torch.tensor(status.has_gradient, dtype=torch.uint8, device=self.device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self.replicas)
        return replace(total, has_gradient=has_gradient.bool().tolist())

    def reduce_gradients(
        self, model: nn.Module, status: RankStatus, unused: Collection[str]
    ) -> None:
        """Sum the gradients over the replicas, then those of the two copies of a tied weight."""
        if self.num_replicas > 1:
            parameters = [p for p in model.parameters() if p.requires_grad]
            sum_gradients(parameters, status.has_gradient, group=self.replicas)
        if self.tied is not None and self.tied.requires_grad:
            self._sum_tied(self.tied)

    def _sum_tied(self, copy: nn.Parameter) -> None:
        """Give both copies of a weight the sum of their gradients, with the same bits: they must
        stay equal.
        """
        gradient = torch.zeros_like(copy) if copy.grad is None else copy.grad.contiguous()
        if self.is_first:
            last = self.num_stages - 1
            of_head = torch.empty_like(gradient)
            dist.recv(of_head, group=self.stages, group_src=last)
            gradient += of_head
            dist.send(gradient, group=self.stages, group_dst=last)
        else:
            dist.send(gradient, group=self.stages, group_dst=0)
            dist.recv(gradient, group=self.stages, group_src=0)
        copy.grad = gradient

    def clip(self, model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clip to the norm over all stages, in which a tied weight counts once."""
        own = [p.grad for p in parameters if not (self.is_last and p is self.tied)]
        own_norm = torch.nn.utils.get_total_norm(own).double()
        squared = own_norm.square().to(self.device)
        dist.all_reduce(squared, group=self.stages)
        norm = squared.sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def is_true_on_all_shards(self, value: Tensor | bool) -> bool:
        """Ask all ranks, because each sees its own stage only."""
        (num_false,) = sum_over_ranks(self.accelerator, [float(not value)])
        return num_false == 0
