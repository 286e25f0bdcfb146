"""The page over HTTP, and the data that it requests.

`flash view` makes the application with `make_app` and serves it with `flash.http` until the user ends it. The server
only reads. It answers only requests that use a host name of this machine. No path of a request reaches the
file system: static files have fixed names, and a request names a run by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flash.errors import FlashError
from flash.http.server import with_headers
from flash.text import one_line
from flash.view.charts import DRAWN, DrawnChart
from flash.view.cluster import ShownCluster, show_cluster
from flash.view.prometheus import MEDIA_TYPE, Latest, exposition
from flash.view.runs import Rows, ViewedRun
from flash.view.samples import FoundSamples, Query, ShownGroup, find, show_group
from flash.view.timeline import Window, show_window

STATIC = Path(__file__).parent / "static"
"""Folder of the files that the page consists of."""
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
"""Media type of each kind of file that is served."""
ASSETS = {
    f"/{file.name}".replace("/index.html", "/"): file for file in sorted(STATIC.iterdir()) if file.suffix in MEDIA_TYPES
}
"""Files that are served, by the path of their URL."""
HOSTS = ("127.0.0.1", "localhost")
"""Host names that a request may use. Others are refused: a foreign site could let its own name point to this machine
(DNS rebinding) and so read the page."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    # Plotly inserts style elements into the page. Scripts come only from this server.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Headers of every response. Texts of a model are shown in the page and must never run as scripts."""
DIGITS = 15
"""Largest number of digits of an integer in a query: JavaScript's numbers are exact up to 15 digits."""

T = TypeVar("T")
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Unix time in seconds, limited to a range in which floats distinguish nearby moments."""


class TimeRange(msgspec.Struct, frozen=True):
    """Part of a run's time, in Unix seconds. None: the beginning, or the end, of the run."""

    start: Seconds | None = None
    stop: Seconds | None = None


class RunFacts(msgspec.Struct, frozen=True):
    """Description of a run in the list of runs."""

    name: str
    """Shortest name that distinguishes the run from the other ones."""
    path: str
    """Run directory."""
    shown: bool
    """True if the page shows the run from the start. The user can select the others."""
    facts: dict[str, str]
    """Main settings, such as the model, under names for people."""


class Contents(msgspec.Struct, frozen=True):
    """Data that the page needs at its start."""

    runs: list[RunFacts]
    """Runs in the order of their numbers, which other requests use."""
    charts: Sequence[DrawnChart]
    """Charts of the overview, which are the same for all runs."""


def make_app(runs: Sequence[ViewedRun], shown: int) -> Starlette:
    """Return the application for these runs. The page shows the first `shown` runs from the start."""

    # Each function below but `run_of` answers the requests for one path, which `answers` or `routes` names.
    def run_of(request: Request) -> ViewedRun:
        """Return the run that a request names by its number in `runs`."""
        return runs[_number(request, "run", len(runs))]

    def contents(_: Request) -> Contents:
        """Return the list of runs and the charts, once when the page is opened."""
        descriptions = [
            RunFacts(run.name, one_line(str(run.directory.path)), number < shown, run.facts())
            for number, run in enumerate(runs)
        ]
        return Contents(descriptions, DRAWN)

    def rows(request: Request) -> Rows:
        """Return the new rows of a run, every few seconds. `steps` and `evals` are the numbers that the page has."""
        sequence = request.query_params.get("sequence", "")
        return run_of(request).rows(sequence, _number(request, "steps"), _number(request, "evals"))

    def samples(request: Request) -> FoundSamples:
        """Return the samples that a search finds."""
        return find(run_of(request).directory, _decoded(request, Query))

    def group(request: Request) -> ShownGroup:
        """Return the samples of one group of a step, token by token."""
        return show_group(run_of(request).directory, _number(request, "step"), _number(request, "group"))

    def timeline(request: Request) -> Window | None:
        """Return the part of the timeline that the page shows; None (`null` in JSON) if there is nothing to show."""
        part = _decoded(request, TimeRange)
        return show_window(run_of(request).spans(), part.start, part.stop)

    def cluster(request: Request) -> ShownCluster:
        """Return the cluster page of a run, every few seconds while it is open."""
        return show_cluster(run_of(request).directory)

    def metrics(_: Request) -> Response:
        """Return the newest numbers of all runs, for Prometheus. This is the only reply that is not JSON."""
        return Response(exposition(list(_readable(runs))), media_type=MEDIA_TYPE)

    answers: dict[str, Callable[[Request], object]] = {
        "/api/contents": contents,
        "/api/rows": rows,
        "/api/samples": samples,
        "/api/group": group,
        "/api/timeline": timeline,
        "/api/cluster": cluster,
    }
    return Starlette(
        routes=[
            *(Route(path, _asset(file)) for path, file in ASSETS.items()),
            Route("/plotly.js", _plotly),
            Route("/metrics", metrics),
            *(Route(path, _answering(answer)) for path, answer in answers.items()),
        ],
        middleware=[Middleware(_WithHeaders), Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
        exception_handlers={FlashError: _failed},
    )


def _readable(runs: Sequence[ViewedRun]) -> Iterator[Latest]:
    """Yield the newest numbers of each run that can be read, for `metrics`. A run that cannot be read is left out."""
    for run in runs:
        with suppress(FlashError):
            yield run.latest()


def _number(request: Request, name: str, below: int | None = None) -> int:
    """Return the whole number with this name in a request's query. `below`: its upper limit; None: no other limit.

    Raises:
        HTTPException: the value is missing, is not a whole number of at most DIGITS digits, or is `below` or more.
    """
    text = request.query_params.get(name, "")
    if not text.isdecimal() or len(text) > DIGITS or (below is not None and int(text) >= below):
        end = "" if below is None else f" below {below}"
        raise HTTPException(400, f"{name}={text[:40]!r}: expected a whole number{end}")
    return int(text)


def _decoded(request: Request, kind: type[T]) -> T:
    """Convert the query of a request to a struct of type `kind`. Raises HTTPException if a value is invalid."""
    # `run` is no field of the struct: `run_of` reads it.
    values = {name: text for name, text in request.query_params.items() if name != "run"}
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise HTTPException(400, str(error)) from error


# Starlette runs endpoints that are plain functions in threads, so reading and encoding do not block the event loop.
def _answering(answer: Callable[[Request], object]) -> Callable[[Request], Response]:
    """Return an endpoint that encodes the result of `answer`, a function of `make_app`, as JSON."""

    def handle(request: Request) -> Response:
        """Reply to one request."""
        return Response(msgspec.json.encode(answer(request)), media_type="application/json")

    return handle


def _asset(file: Path) -> Callable[[Request], Response]:
    """Return an endpoint that serves a static file. The file is read at each request."""

    def handle(_: Request) -> Response:
        """Reply to one request."""
        return Response(file.read_bytes(), media_type=MEDIA_TYPES[file.suffix])

    return handle


def _plotly(_: Request) -> Response:
    """Return the script of Plotly. Browsers cache it: it has five megabytes and does not change."""
    return Response(_plotly_script(), media_type="text/javascript", headers={"cache-control": "private, max-age=3600"})


@cache
def _plotly_script() -> str:
    """Return the script of Plotly from the Python package, which is imported only if a browser asks for it."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _failed(_: Request, error: Exception) -> Response:
    """Return the response to a request that raised a FlashError, such as a run whose files cannot be read."""
    return Response(str(error), status_code=500, media_type="text/plain")


class _WithHeaders:
    """ASGI middleware that adds HEADERS to each response. Headers that a response already has are kept."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await self._app(scope, receive, with_headers(send, HEADERS))
