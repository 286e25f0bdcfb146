"""Hub ids without a model: they are reported before any work, from the answers of the hub and its cache."""

from __future__ import annotations

import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flash.run.models import hugging_face_fault

ANSWERS = {
    "/owner/there": (200, ""),
    "/owner/gone": (404, "RepoNotFound"),
    "/owner/gated": (403, "GatedRepo"),
    "/owner/data": (404, "EntryNotFound"),
}
"""Answers of the fake hub, by the beginning of the path: status code, and error code in a header."""


class FakeHub(BaseHTTPRequestHandler):
    """Server that answers questions about files like a hub, in the headers."""

    def do_HEAD(self) -> None:
        """Answer with the code and the error of `ANSWERS` for the path; 500 for other paths."""
        code, error = next((answer for path, answer in ANSWERS.items() if self.path.startswith(path)), (500, ""))
        self.send_response(code)
        headers = {"X-Error-Code": error} if error else {"ETag": "1", "X-Repo-Commit": "1", "Content-Length": "2"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def endpoint() -> Generator[str]:
    """Start a `FakeHub`, and return its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_model_that_the_hub_has_is_taken(endpoint: str, tmp_path: Path) -> None:
    assert hugging_face_fault("owner/there", cache=tmp_path, endpoint=endpoint) == ""


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            "owner/gone",
            "no folder owner/gone here, no such model in the cache {cache}, and none at {endpoint}",
        ),
        ("owner/gated", "owner/gated is given at {endpoint} to those only who were granted access"),
        ("owner/data", "owner/data has no config.json at {endpoint}"),
        ("owner/broken", "and {endpoint} cannot be asked ("),
        ("a--b", "there is no folder a--b here, and it can be no hub id ("),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_reported(model: str, told: str, endpoint: str, tmp_path: Path) -> None:
    fault = hugging_face_fault(model, cache=tmp_path, endpoint=endpoint)
    assert told.format(cache=tmp_path, endpoint=endpoint) in fault


def test_a_model_in_the_cache_needs_no_hub_and_another_one_does(tmp_path: Path) -> None:
    revision = tmp_path / "models--owner--kept" / "snapshots" / "1"
    revision.mkdir(parents=True)
    (revision / "config.json").write_text("{}")
    (tmp_path / "models--owner--kept" / "refs").mkdir()
    (tmp_path / "models--owner--kept" / "refs" / "main").write_text("1")
    nobody = "http://127.0.0.1:9"
    assert hugging_face_fault("owner/kept", cache=tmp_path, endpoint=nobody) == ""
    assert f"no such model in the cache {tmp_path}, and {nobody} cannot be asked (" in hugging_face_fault(
        "owner/other", cache=tmp_path, endpoint=nobody
    )
