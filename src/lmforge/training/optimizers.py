"""Optimizers as lists: one for all parameters, or Muon for the matrices beside AdamW for the rest.

Every parameter group keeps its peak rate in `peak_lr`; the training step sets `lr = peak_lr * schedule(step)`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def adamw(network: nn.Module, lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> list[Optimizer]:
    """AdamW (Loshchilov & Hutter 2019) on all trainable parameters; norms, biases and other vectors are not decayed."""
    return [_adamw(_trainable(network), lr, betas, eps, weight_decay)]


def muon(
    network: nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    adamw_lr: float,
    betas: Sequence[float],
    eps: float,
) -> list[Optimizer]:
    """Muon on the matrices inside the blocks, AdamW on embeddings, head and vectors."""
    parameters = _trainable(network)
    matrices = {name: p for name, p in parameters.items() if p.dim() == 2 and name.startswith("blocks.")}
    rest = {name: p for name, p in parameters.items() if name not in matrices}
    return [Muon(matrices.values(), lr, momentum, weight_decay), _adamw(rest, adamw_lr, betas, eps, 0.0)]


def _trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def _adamw(
    parameters: dict[str, nn.Parameter], lr: float, betas: Sequence[float], eps: float, weight_decay: float
) -> Optimizer:
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    plain = [p for p in parameters.values() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "peak_lr": lr},
        {"params": plain, "weight_decay": 0.0, "peak_lr": lr},
    ]
    groups = [group for group in groups if group["params"]]
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters.values()):
        return WideAdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps)
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)


class WideAdamW(Optimizer):
    """AdamW for weights that are stored in 16 bits: moments and arithmetic in float32.

    In the weights' own dtype the squares of ordinary gradients vanish in float16, and bfloat16's second moment stops
    moving; only the weight itself is rounded here.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad.float(), group)

    def _step(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        state["step"] = state["step"].cpu() + 1  # a checkpoint's comes back on the weights' device
        count = float(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1.0 - beta1) / (1.0 - beta1**count)
        square = state["exp_avg_sq"].lerp_(gradient.square(), 1.0 - beta2) / (1.0 - beta2**count)
        weight = p.float() * (1.0 - group["lr"] * group["weight_decay"])
        p.copy_(weight.addcdiv_(mean, square.sqrt_().add_(group["eps"]), value=-group["lr"]))


class Muon(Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024), scaled to AdamW's size (Liu et al. 2025).

    torch's own Muon iterates in bf16, which moves weights by up to 2 % between a sharded and a whole matrix; this one
    iterates in the parameter's own precision on the gathered matrix, so that sharding changes nothing but rounding.
    Matrices of one shape go through the iteration as one batch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float):
        defaults = {"lr": lr, "peak_lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(parameters), defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for parameters in by_shape.values():
                self._step_batch(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _step_batch(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        directions = torch.stack([_whole(self._nesterov(p, momentum)) for p in parameters])
        updates = orthogonalize(directions) * (0.2 * max(directions.shape[-2:]) ** 0.5)
        for p, update in zip(parameters, updates.to(parameters[0].dtype), strict=True):
            p.mul_(1.0 - lr * weight_decay).add_(_like(update, p), alpha=-lr)

    def _nesterov(self, p: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum_buffer"]
        assert p.grad is not None
        buffer.lerp_(p.grad, 1.0 - momentum)
        return p.grad.lerp(buffer, momentum)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of `[n, rows, columns]` matrices towards one by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Cut a whole tensor, equal on all ranks, the way `parameter` is sharded; no communication."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
