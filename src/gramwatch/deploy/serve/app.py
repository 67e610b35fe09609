"""The routes: a plain one, those of the Open Inference Protocol, health, metrics, OpenAPI."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gramwatch.deploy.serve import protocol
from gramwatch.deploy.serve.judge import Judge
from gramwatch.deploy.serve.metrics import Metrics, Timed
from gramwatch.deploy.serve.protocol import (
    Answer,
    Failure,
    InferenceAnswer,
    InferenceRequest,
    Live,
    Metadata,
    Ready,
    ServerMetadata,
    Watched,
    Welcome,
)
from gramwatch.deploy.serve.server import OwnSite
from gramwatch.deploy.serve.service import Limits, Service, Wish
from gramwatch.files import __version__
from gramwatch.stream.monitor import Monitor

SAVE_SECONDS = 60.0
"""Seconds between two saves of the monitor's state."""
_REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": text}
    for status, text in {
        400: "The request is not understood, or an image cannot be read.",
        403: "A page of another site asks, or the name of this machine is unknown.",
        408: "The body came too slowly.",
        413: "The body, an image or the number of images is too large, or decoding takes too long.",
        429: "Too many images wait.",
        503: "The service is not ready, or the verdict takes too long.",
    }.items()
}
_UNKNOWN: dict[int | str, dict[str, Any]] = {
    404: {"model": Failure, "description": "There is no such model."}
}
_UNAUTHORISED: dict[int | str, dict[str, Any]] = {401: {"model": Failure, "description": "No valid token."}}
_FILE = {"schema": {"type": "string", "format": "binary"}}
_FORM = {"type": "object", "properties": {"file": _FILE["schema"]}, "required": ["file"]}


def create_app(
    judge: Judge,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    name: str = "guard",
    hosts: Sequence[str] = (),
    save_seconds: float = SAVE_SECONDS,
) -> FastAPI:
    """The service as an ASGI application.

    Args:
        judge: the guard, with its preprocessing, classes and monitor.
        limits: what is accepted at most.
        token: what clients must send as `Authorization: Bearer TOKEN`. None: anyone may ask.
        name: the name of the model in the routes of the Open Inference Protocol.
        hosts: without a token: the names under which clients may ask, besides those of this machine. `"*"`:
            any name.
        save_seconds: how often the state of the monitor is saved.

    """
    metrics = Metrics(judge.monitor)
    service = Service(judge, limits or Limits(), metrics)

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        saving = asyncio.ensure_future(service.save_regularly(save_seconds))
        yield
        saving.cancel()
        await service.stop()

    app = FastAPI(title="gramwatch", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    if token is None:
        app.add_middleware(OwnSite, hosts=hosts)
    app.add_middleware(Timed, metrics=metrics)
    app.include_router(_open_routes(service, name))
    allowed = [Depends(_bearer(token))] if token is not None else []
    closed = APIRouter(dependencies=allowed, responses=_UNAUTHORISED if token is not None else {})
    _add_plain(closed, service)
    _add_inference(closed, service, name)
    app.include_router(closed)
    _add_errors(app)
    return app


# --- who may ask -------------------------------------------------------------------------------------


def _bearer(token: str) -> Callable[..., None]:
    expected = token.encode()
    scheme = HTTPBearer(auto_error=False)

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        sent = given.credentials.encode("utf-8", "surrogateescape") if given is not None else b""
        if not hmac.compare_digest(sent, expected):
            raise HTTPException(401, "a valid token is needed", {"WWW-Authenticate": "Bearer"})

    return check


# --- routes ------------------------------------------------------------------------------------------


def _open_routes(service: Service, name: str) -> APIRouter:
    """The routes about the service and its health. They need no token."""
    router = APIRouter(tags=["health"])
    routes = {
        "POST /score": "an image file, a form with files, or JSON: the verdicts",
        "POST /score?reasons=true": "the same, and why images are flagged",
        f"POST /v2/models/{name}/infer": "the Open Inference Protocol",
        "GET /healthz, /readyz": "health",
        "GET /metrics": "counters for Prometheus",
        "GET /openapi.json": "all routes, for programs",
    }
    if service.judge.monitor is not None:
        routes["GET /monitor"] = "whether the stream of images has changed"

    @router.get("/")
    async def welcome() -> Welcome:
        """What is here."""
        return Welcome(name="gramwatch", version=__version__, routes=routes)

    unready: dict[int | str, dict[str, Any]] = {503: {"model": Ready, "description": "Not ready."}}

    @router.get("/healthz")
    @router.get("/v2/health/live")
    async def live() -> Live:
        """Whether the process is alive."""
        return Live(live=True)

    @router.get("/readyz", responses=unready)
    @router.get("/v2/health/ready", responses=unready)
    async def ready(response: Response) -> Ready:
        """Whether requests are accepted."""
        response.status_code = 200 if service.ready else 503
        return Ready(ready=service.ready)

    return router


def _add_plain(router: APIRouter, service: Service) -> None:
    body = {
        "required": True,
        "content": {
            "image/*": _FILE,
            "application/octet-stream": _FILE,
            "application/json": {"schema": protocol.Images.model_json_schema()},
            "multipart/form-data": {"schema": _FORM},
        },
    }

    @router.post("/score", response_model=Answer, responses=_REFUSED, openapi_extra={"requestBody": body})
    async def score(request: Request, reasons: bool = False) -> Response:
        """Judge an image file, or several in a form or in JSON. With `reasons`, say why they are flagged."""
        images = _images_in(request.headers.get("content-type", ""))
        verdicts = await service.verdicts(request, lambda body: Wish(images(body), reasons))
        return JSONResponse({"results": verdicts})

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    monitor = service.judge.monitor
    if monitor is None:
        return

    @router.get("/monitor")
    async def watched() -> Watched:
        """Whether the stream of images has changed, since when, and what drives it."""
        return await service.in_judges_thread(lambda: _state(monitor, service.judge))


def _images_in(kind: str) -> Callable[[bytes], list[bytes]]:
    """The reader of bodies with this Content-Type."""
    match kind.partition(";")[0].strip().lower():
        case "application/json":
            return protocol.several_images
        case "multipart/form-data":
            return lambda body: protocol.images_of_form(body, kind)
        case _:
            return protocol.one_image


def _state(monitor: Monitor, judge: Judge) -> Watched:
    return Watched(
        alarm=monitor.alarm,
        alarm_at=monitor.alarm_at,
        since=monitor.since,
        strength=monitor.strength,
        images=monitor.seen,
        parts={str(part.name): part.flagged for part in monitor.parts},
        classes={judge.name_of(int(group.name)): group.flagged for group in monitor.classes},
    )


def _add_inference(router: APIRouter, service: Service, name: str) -> None:
    """The routes of the Open Inference Protocol."""

    def known(model: str) -> None:
        if model != name:
            raise HTTPException(404, "there is no such model")

    @router.get("/v2")
    async def server() -> ServerMetadata:
        """Name and version of the server."""
        return ServerMetadata(name="gramwatch", version=__version__, extensions=[])

    @router.get("/v2/models/{model}", responses=_UNKNOWN)
    async def metadata(model: str) -> Metadata:
        """What the model takes and gives."""
        known(model)
        return Metadata(
            name=name,
            versions=["1"],
            platform="gramwatch",
            inputs=[protocol.Tensor(name=protocol.INPUT, datatype="BYTES", shape=[-1])],
            outputs=[
                protocol.Tensor(name=output, datatype=datatype, shape=[-1])
                for output, datatype in protocol.output_types(service.judge.parts).items()
            ],
        )

    @router.get("/v2/models/{model}/ready", responses=_UNKNOWN | {503: {"model": Ready}})
    async def model_ready(model: str, response: Response) -> Ready:
        """Whether the model accepts requests."""
        known(model)
        response.status_code = 200 if service.ready else 503
        return Ready(ready=service.ready)

    schema = InferenceRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    inner = schema.pop("$defs")
    body = {"required": True, "content": {"application/json": {"schema": _without_refs(schema, inner)}}}

    @router.post(
        "/v2/models/{model}/infer", responses=_REFUSED | _UNKNOWN, openapi_extra={"requestBody": body}
    )
    async def infer(model: str, request: Request) -> InferenceAnswer:
        """Judge images, as the Open Inference Protocol has it."""
        known(model)
        asked: list[InferenceRequest] = []
        types: dict[str, protocol.Datatype] = {}

        def parse(data: bytes) -> Wish:
            asked.append(protocol.inference_request(data))
            types.update(asked[0].chosen(protocol.output_types(service.judge.parts)))
            return Wish(asked[0].images(), asked[0].reasons)

        verdicts = await service.verdicts(request, parse)
        return InferenceAnswer(
            model_name=name, model_version="1", id=asked[0].id, outputs=protocol.outputs(verdicts, types)
        )


def _without_refs(schema: Any, inner: Mapping[str, Any]) -> Any:
    """A schema with its references replaced by the parts they name."""
    if isinstance(schema, list):
        return [_without_refs(part, inner) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _without_refs(inner[schema["$ref"].rpartition("/")[2]], inner)
    return {key: _without_refs(value, inner) for key, value in schema.items()}


# --- errors: one line, without traces and paths ------------------------------------------------------


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def not_understood(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]!s:.80}: {first['msg']:.200}"}, 400)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> JSONResponse:
        return JSONResponse({"error": "the client has gone"}, 400)

    @app.exception_handler(MemoryError)
    async def exhausted(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(
            {"error": "there is not enough memory: try again later"}, 503, {"Retry-After": "1"}
        )

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse({"error": "internal error"}, 500)
