"""The OpenAPI document."""

from __future__ import annotations

import json

from envs.sandbox.service.endpoint import document
from envs.sandbox.service.web import ENDPOINTS


def test_the_openapi_document_describes_every_endpoint():
    made = json.loads(json.dumps(document(ENDPOINTS)))
    assert made["openapi"] == "3.1.0"
    for endpoint in ENDPOINTS:
        operation = made["paths"][endpoint.path][endpoint.method.lower()]
        assert str(endpoint.status) in operation["responses"]
        assert {p["name"] for p in operation["parameters"] if p["in"] == "path"} == {
            part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")
        }
    names = set(made["components"]["schemas"])
    found = {part.split('"')[0] for part in json.dumps(made).split("#/components/schemas/")[1:]}
    assert found <= names
    assert {"SandboxOrder", "Spec", "Result", "HttpProblem"} <= names
    ids = [o["operationId"] for path in made["paths"].values() for o in path.values()]
    assert made["security"] == [{"token": []}]
    assert all(ids)
    assert len({*ids}) == len(ids)
