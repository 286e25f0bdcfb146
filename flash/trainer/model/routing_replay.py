"""Routing replay makes the trainer's routers take the experts that the engine's routers chose.

In a mixture of experts, the *router* of a layer scores the experts for each token and sends the token to the best ones;
the choice is the token's *route*. Engine and trainer round differently. Where two experts score almost the same, the
two sides may choose different experts, and then compute the log-probs of this token and of later tokens with different
networks. With replay, the trainer computes the scores and their gradient itself, and only the choice of the best
experts is given (Ma et al. 2025, arXiv 2510.11370).

Routers choose experts by `torch.topk`. `RoutingReplay` intercepts this call while a router runs, so that transformers'
models need no code of ours. `flash.trainer.model.packing_check.replay_routing` installs it at the start;
`token_logprobs` passes the routes of each forward pass.

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
    """Hooks on the routers of one model, which make the routers choose given experts.

    The hooks and the routes of the last forward pass stay, so that a layer that is recomputed for its backward pass
    gets the same experts again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Put hooks on all routers of a model.

        Raises:
            ConfigError: the model has no routers of a known kind.
        """
        self._routers = routers(model)
        if not self._routers:
            raise ConfigError(
                f"rollout.routing_replay: {type(model).__name__.removeprefix('FSDP')} has no layer that is known to "
                "choose experts; leave it out"
            )
        # Experts for the next pass; None: the routers' own choice.
        self._routes_ULK: Tensor | None = None
        self.verifies = False
        """True to intercept `torch.topk` also in a pass without routes. The check at the start sets it, to learn
        whether each router makes exactly one such call. `replay_routing` sets it back to False."""
        for router in self._routers:
            begin, end = self._hooks(router)
            router.module.register_forward_pre_hook(begin)
            router.module.register_forward_hook(end, always_call=True)

    def set_routes(self, routes_ULK: Tensor | None) -> None:
        """Choose these experts in the next forward pass and its backward pass; None: the routers' own choice.

        `token_logprobs` calls this before each forward pass. A route of −1 also leaves the choice to the router. It
        stands for a token whose engine reported no experts. The forward pass raises ContractError if the routes have
        another number of experts for each token than the routers choose.

        Raises:
            ContractError: the routes have fewer layers than the policy, or an expert that the policy does not have.
                The error is raised on this rank alone.
        """
        if routes_ULK is not None:
            # The last router is in the last layer with experts. Engines also report layers without experts, which may
            # come after it, so routes with more layers are right.
            layers, most = self._routers[-1].layer + 1, int(routes_ULK.max()) if len(routes_ULK) else -1
            # An index must exist in each layer, so the layer with the fewest experts sets the bound.
            experts = min(router.experts for router in self._routers)
            if routes_ULK.shape[1] < layers or most >= experts:
                raise ContractError(
                    f"engines reported experts up to {most} in {routes_ULK.shape[1]} layers; the policy has {layers} "
                    f"layers of {experts} experts"
                )
        self._routes_ULK = routes_ULK

    def _hooks(self, router: ExpertRouter) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks that run before and after the router's forward pass.

        In between, `torch.topk` is intercepted. The second hook raises a ConfigError if the router has not called it
        exactly once, because the layer would then use other experts than the given experts.
        """
        # The interception in progress; empty outside of the router's forward pass.
        open_modes: list[_GivenTopK] = []

        def begin(module: nn.Module, args: Any) -> None:
            # Intercept `torch.topk` from here on, with the routes of this router's layer.
            routes_UK = None if self._routes_ULK is None else self._routes_ULK[:, router.layer].long()
            if routes_UK is not None or self.verifies:
                open_modes.append(_GivenTopK(routes_UK, router.experts))
                open_modes[-1].__enter__()

        def end(module: nn.Module, args: Any, output: Any) -> None:
            # End the interception. torch calls this hook also after an error in the router.
            if open_modes:
                mode = open_modes.pop()
                mode.__exit__(None, None, None)
                # Without output, the router has raised an error, which this error must not hide.
                if output is not None and mode.calls != 1:
                    raise ConfigError(
                        f"rollout.routing_replay: {type(module).__name__} chooses its experts in a way that is not "
                        "known; leave it out"
                    )

        return begin, end


class _GivenTopK(TorchFunctionMode):
    """Replaces the result of `torch.topk` over all experts by given experts. Where −1 is given, the result stays.

    torch calls `__torch_function__` for every function that is called while the mode is entered. Without routes, the
    calls are only counted.
    """

    def __init__(self, routes_UK: Tensor | None, experts: int) -> None:
        """Give the experts `routes_UK`; None only counts the calls. `experts` is the number of the layer's experts."""
        super().__init__()
        self._routes_UK, self._experts = routes_UK, experts
        self.calls = 0
        """Number of choices among all experts so far."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function of torch, and return its result or, for the choice of experts, the given experts.

        The given experts are returned with their scores, in the form of `torch.topk`, so that gradients flow.

        Raises:
            ContractError: the given routes have another number of experts for each token than the router chooses.
        """
        found = func(*args, **(kwargs or {}))
        # Only the choice among all experts is replaced: [U, experts].
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2 or args[0].shape[-1] != self._experts:
            return found
        self.calls += 1
        if self._routes_UK is None:
            return found
        # Without this check, `where` below would use a single given expert for each of the router's choices.
        given, taken = self._routes_UK.shape[1], found.indices.shape[1]
        if given != taken:
            raise ContractError(f"engines reported {given} experts for each token; the policy takes {taken}")
        chosen_UK = self._routes_UK.where(self._routes_UK >= 0, found.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen_UK), chosen_UK))
