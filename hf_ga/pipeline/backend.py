"""How the ranks of a pipeline communicate in a window, besides the hidden states that torch's
schedule sends.

The ranks form a grid of replicas x stages. The ranks with the same stage hold the same parameters
and sum their gradients. The ranks of one replica hold the full model together and compute the norm
of its gradient together.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hf_ga.errors import ConfigError
from hf_ga.parallel.backend import Backend, RankStatus, sum_gradients


class PipelineBackend(Backend):
    """The backend for pipelines: ranks form a grid with rank = replica * num_stages + stage.

    Args:
        accelerator: The accelerator of all ranks.
        num_stages: Number of pipeline stages: the number of ranks of one replica.

    Attributes:
        stages: Process group of the stages of this rank's replica.
        ends: Process group of the first and the last stage of this rank's replica.
        replicas: Process group of the ranks that hold this rank's stage in all replicas.
        stage: Index of this rank's stage, from 0.
        num_stages: Number of stages.
        replica: Index of this rank's replica, from 0.
        num_replicas: Number of replicas.
        tied: A parameter (tied embeddings) of which the first and the last stage hold a copy each.
            None: there is none.

    Raises:
        ConfigError: If the number of processes is not a multiple of the number of stages.
    """

    is_sharded = True
    is_stage = True
    reason_not_to_split = (
        "In a pipeline it cannot be split, because a stage that fails in a backward cannot rejoin "
        "the others: make it smaller (per_device_batch_size; the results stay the same)"
    )

    def __init__(self, accelerator: Accelerator, num_stages: int) -> None:
        """Arrange the ranks in a grid, and make the process groups of its rows and columns."""
        super().__init__(accelerator)
        self.num_stages = num_stages
        self.num_replicas = self.num_processes // num_stages
        if self.num_processes % num_stages or not self.num_replicas:
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
        self.replica = self.process_index // num_stages
        self.stage = self.process_index % num_stages
        for replica in range(self.num_replicas):
            first = replica * num_stages
            ends = dist.new_group([first, first + num_stages - 1])  # all ranks must make all groups
            if replica == self.replica:
                self.ends = ends
        self.tied: nn.Parameter | None = None
        self._hooks = ExitStack()  # of the losses of the current window

    @property
    def second_copy(self) -> nn.Parameter | None:
        """The tied parameter on the last stage, which holds the second copy of it."""
        return self.tied if self.stage == self.num_stages - 1 else None

    @contextmanager
    def deferred_backwards(self) -> Iterator[None]:
        """In the block, a schedule runs the backwards, in which the hooks of all losses act."""
        with ExitStack() as hooks:
            self._hooks = hooks
            yield

    def run_backward(
        self, loss: Tensor, hooks: AbstractContextManager[None], *, retain_graph: bool = False
    ) -> None:
        """Let hooks act until the schedule has run the backward of a micro-batch's loss.

        Args:
            loss: Not needed: it is returned to the schedule.
            hooks: A context in which the backward leaves out the loss's divisions.
            retain_graph: Not needed.
        """
        self._hooks.enter_context(hooks)

    def all_reduce_status(self, status: RankStatus) -> RankStatus:
        """Sum what the ranks of a pipeline computed in a window (loss, targets, failures). Only the
        last stage of each replica has a loss. Whether a parameter has a gradient is combined over
        the replicas of this stage only, since other stages have other parameters.

        Args:
            status: What this rank computed.

        Returns:
            The status of all ranks.
        """
        total = super().all_reduce_status(replace(status, has_gradient=()))
        if not status.has_gradient:
            return total
        has_gradient = torch.tensor(status.has_gradient, dtype=torch.uint8, device=self.device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self.replicas)
        return replace(total, has_gradient=has_gradient.bool().tolist())

    def sum_over_replicas(
        self, parameters: Sequence[nn.Parameter], has_gradient: Sequence[bool]
    ) -> None:
        """Sum this pipeline stage's gradients over the replicas, then sum the gradients of the two
        copies of a tied weight, which are on the first and the last stage.

        Args:
            parameters: The trainable parameters of this stage.
            has_gradient: For each of them, whether any replica has a gradient of it.
        """
        if self.num_replicas > 1:
            sum_gradients(parameters, has_gradient, group=self.replicas)
        tied = self.tied
        if tied is not None and tied.requires_grad:
            gradient = torch.zeros_like(tied) if tied.grad is None else tied.grad.contiguous()
            dist.all_reduce(gradient, group=self.ends)
            tied.grad = gradient

    def clip(self, model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the gradients of this pipeline stage to a global L2 norm of at most `max_norm`, and
        return the norm over all stages before clipping. A tied weight counts once in the norm.
        """
        # Its gradient is the same on the first stage, so the last stage does not count it.
        gradients = [p.grad for p in parameters if p is not self.second_copy]
        own_norm = torch.nn.utils.get_total_norm(gradients).double()
        squared = own_norm.square().to(self.device)
        dist.all_reduce(squared, group=self.stages)
        norm = squared.sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
