"""Muon: momentum whose update is orthogonalised (Jordan et al., 2024), in the precision of the machine.

torch.optim.Muon always iterates in bfloat16, which a CPU without bf16 instructions emulates: 20 to 45 times slower
than float32 there, several seconds a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ondevice.precision import bfloat16_pays

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in torch.optim.Muon


class Muon(torch.optim.Optimizer):
    """Muon for matrices; the same update as torch.optim.Muon.

    lr: for a square matrix; scaled by sqrt(max(1, rows / columns)).
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                average = state.setdefault("momentum", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(average, group["momentum"]))  # Nesterov
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """The matrix with its singular values moved to between about 0.7 and 1.2, by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16() if bfloat16_pays(matrix.device.type) else matrix
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    return x.to(matrix.dtype)
