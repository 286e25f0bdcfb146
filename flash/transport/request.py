"""A request names the struct that answers it, so that every call of it is typed.

`class Add(Request[Sum], frozen=True, tag=True)` says that a `Sum` answers an `Add`: whoever calls gets a `Sum`, and
nothing else is taken for its reply. The name is part of the class and not of the bytes.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, get_args

import msgspec

from flash.errors import ContractError

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class Request(msgspec.Struct, Generic[ReplyT], frozen=True):
    """The base of all requests; its argument is the reply's struct."""


def reply_type(request: type[Request[ReplyT]]) -> type[ReplyT]:
    """The struct that answers this class of requests."""
    bases: tuple[Any, ...] = vars(request)["__orig_bases__"]
    (struct,) = get_args(bases[0])
    return struct


def answered(request: Request[ReplyT], reply: msgspec.Struct) -> ReplyT:
    """The reply of whoever serves this request, checked.

    Raises:
        ContractError: the request names another struct as its reply.
    """
    wanted = reply_type(type(request))
    if not isinstance(reply, wanted):
        raise ContractError(
            f"{type(request).__name__} was answered with {type(reply).__name__}, not with {wanted.__name__}"
        )
    return reply
