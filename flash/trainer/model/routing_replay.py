"""Routing replay: the trainer's routers take the experts that the engine's chose (Ma et al. 2025, arXiv 2510.11370).

Engine and trainer round differently. Where two experts are nearly as good each may choose another one, and what either
says of this token and of later ones is then said by another network. Here the scores stay the trainer's own, and get
their gradient; which experts are best is told. Routers find them by `torch.topk`, and that is what is answered: stock
models need no code of ours.

Shape legend: U = tokens of a row, L = decoder layers, K = experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from flash.errors import ConfigError, ContractError
from flash.foreign.transformers import ExpertRouter, routers


class RoutingReplay:
    """What the routers of a model are told.

    Hooks stay with the model, so that a layer that is computed again for its backward pass is told again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Look into the routers of a model.

        Raises:
            ConfigError: it has none that are known.
        """
        self._routers = routers(model)
        if not self._routers:
            raise ConfigError(
                f"rollout.routing_replay: nothing in {type(model).__name__.removeprefix('FSDP')} is known to choose "
                "experts; leave it out"
            )
        self._routes_ULK: Tensor | None = None
        self.watches = False
        """Whether routers are looked at that are told nothing: they have to ask as is known."""
        for router in self._routers:
            begin, end = self._around(router)
            router.module.register_forward_pre_hook(begin)
            router.module.register_forward_hook(end, always_call=True)

    def take(self, routes_ULK: Tensor | None) -> None:
        """In the next forward pass, and its backward pass, choose these; None: as without.

        Raises:
            ContractError: they are of another model.
        """
        if routes_ULK is not None:
            layers, most = self._routers[-1].layer + 1, int(routes_ULK.max()) if len(routes_ULK) else -1
            experts = min(router.experts for router in self._routers)
            if routes_ULK.shape[1] < layers or most >= experts:
                raise ContractError(
                    f"engines told experts up to {most} in {routes_ULK.shape[1]} layers; the policy has {layers} "
                    f"layers of {experts}"
                )
        self._routes_ULK = routes_ULK

    def _around(self, router: ExpertRouter) -> tuple[Callable[..., None], Callable[..., None]]:
        """What is called before and after its forward pass."""
        open_modes: list[_Told] = []

        def begin(module: nn.Module, args: Any) -> None:
            told = None if self._routes_ULK is None else self._routes_ULK[:, router.layer].long()
            if told is not None or self.watches:
                open_modes.append(_Told(told, router.experts))
                open_modes[-1].__enter__()

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if open_modes:
                told = open_modes.pop()
                told.__exit__(None, None, None)
                if output is not None and told.asked != 1:
                    raise ConfigError(
                        f"rollout.routing_replay: {type(module).__name__} chooses its experts in a way that is not "
                        "known; leave it out"
                    )

        return begin, end


class _Told(TorchFunctionMode):
    """Answers the one question for the K best of all experts."""

    def __init__(self, routes_UK: Tensor | None, experts: int) -> None:
        super().__init__()
        self._routes_UK, self._experts = routes_UK, experts
        self.asked = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2 or args[0].shape[-1] != self._experts:
            return found
        self.asked += 1
        if self._routes_UK is None:
            return found
        chosen_UK = self._routes_UK.where(self._routes_UK >= 0, found.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen_UK), chosen_UK))
