"""ZeRO by the deepspeed package: optimizer state (stage 1), gradients (2) and weights (3) cut over the ranks.

DeepSpeed flattens every parameter group, keeps this rank's stretch of it in float32, and does backward, clipping and
update itself. Nothing of it reaches the disk: checkpoints hold whole tensors under the network's own names, which are
gathered and set one at a time, so that any other strategy and number of ranks goes on from them.
"""

import io
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lmforge.config.errors import UsageError
from lmforge.parallel.parallel import Load, MakeOptimizers, Parallel, State
from lmforge.parallel.precision import ForwardPrecision

BUCKET = 50_000_000  # elements that are reduced or gathered at once, 200 MB of them in float32
WHOLE = 100_000  # stage 3: parameters of fewer elements stay on every rank; to gather them costs more than they take


class Zero(Parallel):
    """A network on the meta device that becomes DeepSpeed's once it has an optimizer.

    It is filled only then, from `values` or a checkpoint: DeepSpeed makes its float32 copies when it starts, from
    weights that are in the compute dtype. Sets LOCAL_RANK where no launcher has.
    """

    values: Iterable[tuple[str, Tensor]] = ()

    def __init__(self, network: nn.Module, stage: int, precision: ForwardPrecision, device: torch.device):
        super().__init__(network)
        self.stage, self.size, self.rank = stage, dist.get_world_size(), dist.get_rank()
        self.device, self.whole = device, _masters(network, device)
        self.keeper = {name: number % self.size for number, name in enumerate(self.names)}
        self.config = _config(network, stage, precision)
        network.to(precision.compute)
        _prepare(device)
        _materialise(network, device, self.config if stage == 3 else None)

    def optimizers(self, make: MakeOptimizers) -> list[Optimizer]:
        """Start DeepSpeed with the optimizer that `make` gives and fill the network. Every rank calls this."""
        import deepspeed

        (self.base,) = make(network=self.whole)
        _adopt(self.base, self.whole, self.network)
        with redirect_stdout(io.StringIO()):  # one of its optimizers reports memory, whatever the level of the log
            self.engine: Any = deepspeed.initialize(model=self.network, optimizer=self.base, config=self.config)[0]
        self.forward = self.engine
        self._start_state()
        for name, value in self.values:
            self.assign(name, value)
        return [self.base]

    def _start_state(self) -> None:
        """AdamW's state before the first step. Made by that step, DeepSpeed would link the first group's only to the
        parameters that it belongs to."""
        names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
        inner = self.engine.optimizer
        for flat in next(getattr(inner, name) for name in names if hasattr(inner, name)):
            zeros = {slot: torch.zeros_like(flat) for slot in ("exp_avg", "exp_avg_sq")}
            self.base.state[flat] = {"step": torch.zeros((), dtype=torch.float32, device=flat.device), **zeros}
        if hasattr(inner, "_lazy_init_hp_params_optimizer_state"):  # stage 3 looks it up at every use
            inner._lazy_init_hp_params_optimizer_state()

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def norm(self) -> Tensor:
        """Infinite where a gradient is not finite."""
        from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors

        inner = self.engine.optimizer
        if hasattr(inner, "scaled_global_norm"):
            groups = [inner.scaled_global_norm()]
        elif hasattr(inner, "_get_norm_groups"):  # stage 3
            groups = inner._get_norm_groups()
        else:  # stage 1 in bfloat16 has all gradients on every rank
            groups = [get_global_norm_of_tensors(inner.get_grads_for_norm()[0])]
        return combine_grad_norm_groups(groups)

    def clip(self, norm: Tensor, most: float) -> None:
        """Left to the update, which measures the norm once more."""
        self.engine.optimizer.clip_grad = most

    def update(self, precision: ForwardPrecision, optimizers: list[Optimizer], finite: bool) -> None:
        """DeepSpeed sees for itself whether the gradients are finite, and drops them if not."""
        self.engine.step()

    def settle(self) -> None:
        if self.stage == 3:  # gathered weights stay until the next update else
            self.engine.empty_partition_cache()

    # checkpoints: each whole tensor is kept and written by one rank, so each holds its share of a copy

    def owns(self, name: str) -> bool:
        return self.keeper.get(name, 0) == self.rank

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one after the other, which every rank has to go through; kept on the CPU where they are owned."""
        for name in self.names:
            yield name, self.gather(name)
        yield from self.network.named_buffers()

    def states(self, optimizers: list[Optimizer]) -> dict[str, State]:
        return {name: _State(self, name) for name in self.names}

    def fill(self, name: str, tensor: Tensor, load: Load) -> None:
        """One whole parameter at a time on every rank, which keeps its stretch of it."""
        if name not in self.keeper:
            load(self.network.get_buffer(name))
            return
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        load(whole)
        self.assign(name, whole)

    def assign(self, name: str, whole: Tensor) -> None:
        """Set a parameter from the whole tensor, equal on all ranks, which all call this."""
        from deepspeed.runtime.zero import GatheredParameters

        parameter = self.network.get_parameter(name)
        with torch.no_grad(), GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(whole)
        self.keep(name, whole)

    def keep(self, name: str, whole: Tensor, slot: str | None = None) -> None:
        """This rank's stretch of a parameter's float32 values, or of a slot of its optimizer state."""
        from deepspeed import utils

        parameter, whole = self.network.get_parameter(name), whole.to(self.device, torch.float32)
        kind, value = "full", whole
        if self.stage == 3:  # where DeepSpeed's own cut fails unless the ranks divide the tensor
            kind, size = "local", parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            value = F.pad(whole.flatten(), (0, size * self.size - whole.numel()))[size * self.rank :][:size]
        if slot is None:
            getattr(utils, f"safe_set_{kind}_fp32_param")(parameter, value)
        else:
            getattr(utils, f"safe_set_{kind}_optimizer_state")(parameter, value, slot)

    def gather(self, name: str, slot: str | None = None) -> Tensor:
        """The whole float32 values of a parameter or of a slot of its optimizer state. Every rank calls this."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.network.get_parameter(name)
        whole: Tensor = (
            safe_get_full_fp32_param(parameter) if slot is None else safe_get_full_optimizer_state(parameter, slot)
        )
        return whole.cpu() if self.owns(name) else whole


class _State(MutableMapping[str, Tensor]):
    """The optimizer state of one parameter: slots of its shape are gathered and cut, the step counts for all alike."""

    def __init__(self, zero: Zero, name: str):
        self.zero, self.name = zero, name

    def _flat(self) -> dict[str, Tensor]:
        return next(iter(self.zero.base.state.values()))

    def __getitem__(self, slot: str) -> Tensor:
        value = self._flat()[slot]
        return self.zero.gather(self.name, slot) if value.dim() else value

    def __setitem__(self, slot: str, value: Tensor) -> None:
        held = self._flat().get(slot)
        if held is None or bool(held.dim()) != bool(value.dim()):
            raise UsageError(f"the checkpoint holds optimizer state {self.name}/{slot}, which is not AdamW's")
        if value.dim():
            self.zero.keep(self.name, value, slot)
            return
        for state in self.zero.base.state.values():
            state[slot].copy_(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat())

    def __len__(self) -> int:
        return len(self._flat())

    def __delitem__(self, slot: str) -> None:
        raise TypeError(f"{slot} belongs to all parameters")


def _masters(network: nn.Module, device: torch.device) -> nn.Module:
    """The network as optimizers and checkpoints see it: whole shapes in float32, which DeepSpeed hides; no memory."""
    masters = deepcopy(network)
    for module in masters.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.zeros((), device=device).expand(parameter.shape)))
    return masters


def _adopt(optimizer: Optimizer, theirs: nn.Module, ours: nn.Module) -> None:
    """Let an optimizer that was made for one network train another with the same names."""
    names = {parameter: name for name, parameter in theirs.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [ours.get_parameter(names[parameter]) for parameter in group["params"]]


def _config(network: nn.Module, stage: int, precision: ForwardPrecision) -> dict[str, Any]:
    """DeepSpeed's configuration. One micro-batch an update, since the loss is divided and the border set by hand."""
    bucket = min(BUCKET, sum(parameter.numel() for parameter in network.parameters()))
    reduce = {torch.float32: "fp32", torch.bfloat16: "bf16"}[precision.reduce]
    return {
        "train_batch_size": dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_param_persistence_threshold": WHOLE,
            "memory_efficient_linear": False,  # it would replace torch's linear for the whole process
        },
        "bf16": {"enabled": precision.compute == torch.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": reduce},
        "communication_data_type": reduce,
    }


def _prepare(device: torch.device) -> None:
    """What DeepSpeed wants of this process. Lightning tells the ranks that it launches their number on the node, but
    has none itself.

    It would compile programs to learn which C++ operators could be built, and build one for messages: none is needed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read when it is imported first
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    warnings.filterwarnings("ignore", r".*is deprecated. Please use `torch.distributed", FutureWarning)
    import deepspeed.ops

    deepspeed.utils.logger.setLevel(logging.ERROR)  # warnings go to standard output, of skipped updates too
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed()


def _materialise(network: nn.Module, device: torch.device, partition: dict[str, Any] | None) -> None:
    """Take memory layer by layer; with `partition` (stage 3) each layer is cut before the next one is taken."""
    import deepspeed

    for module in reversed(list(network.modules())):  # children before the module that they are in
        own = next(module.parameters(recurse=False), None)
        if own is None:
            continue
        module.to_empty(device=device, recurse=False)
        if partition is not None:
            deepspeed.zero.Init(module, dtype=own.dtype, config_dict_or_path=partition)
