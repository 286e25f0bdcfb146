"""The OpenAPI 3.1 document of the service, made from its table of endpoints and their msgspec types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from envs.sandbox.protocol.problems import MEDIA_TYPE
from envs.sandbox.protocol.wire import MSGPACK, HttpProblem, StreamLine
from envs.sandbox.service.endpoint import Endpoint

_REF = "#/components/schemas/{name}"


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document that describes these endpoints."""
    types = [
        each for endpoint in endpoints for each in (endpoint.body, endpoint.answer, endpoint.query) if _is_type(each)
    ]
    unique = list(dict.fromkeys([*types, HttpProblem, StreamLine]))
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REF)
    schema_of = dict(zip(map(_key, unique), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Flash sandboxes", "version": "1"},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, schema_of: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    if endpoint.query is not None:
        query = components[endpoint.query.__name__]
        parameters += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query["properties"].items()
        ]
    if endpoint.keyed:
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string"}})
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.handler.__name__.strip("_"),
        "parameters": parameters,
        "responses": {
            str(endpoint.status): {"description": endpoint.summary, **_content(endpoint.answer, schema_of)},
            "default": {"description": "An error.", "content": {MEDIA_TYPE: {"schema": schema_of[_key(HttpProblem)]}}},
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, **_content(endpoint.body, schema_of)}
    return operation


def _content(kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    if kind is None:
        return {}
    if isinstance(kind, str):
        schema = schema_of[_key(StreamLine)] if "ndjson" in kind else {"type": "string", "format": "binary"}
        return {"content": {kind: {"schema": schema}}}
    schema = schema_of[_key(kind)]
    return {"content": {"application/json": {"schema": schema}, MSGPACK: {"schema": schema}}}


def _is_type(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, str)


def _key(kind: Any) -> str:
    return str(kind)
