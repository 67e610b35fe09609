"""The bodies of requests and answers: the plain ones, and those of the Open Inference Protocol, version 2."""

import base64
import binascii
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from typing import Any, Literal, TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gramwatch.deploy.serve.judge import Verdict

Kind = TypeVar("Kind", bound=BaseModel)
MOST_VALUES = 10_000
"""Values that a body in JSON may have. To read millions of small ones takes seconds."""
MOST_PARTS = 1_000
"""Parts that a form may have."""

# --- the plain route ---------------------------------------------------------------------------------


class Images(BaseModel):
    """Several images."""

    images: list[str] = Field(
        min_length=1, description="Image files, base64.", json_schema_extra={"items": {"format": "byte"}}
    )


class AtTap(BaseModel):
    """The contribution of a watched tensor to the score of a member."""

    member: str
    tap: str
    contribution: float


class Reasons(BaseModel):
    """Why an image was flagged."""

    sentences: list[str] = Field(description="Three sentences.")
    members: dict[str, float] = Field(description="What each member adds. The sum is the score.")
    taps: list[AtTap] = Field(description="The watched tensors that add most, largest first.")


class Result(BaseModel):
    """The verdict for one image."""

    predicted: int = Field(description="The predicted class.")
    class_name: str | None = Field(alias="class", description="Its name, if it is known.")
    score: float | None = Field(
        description="Higher is more unusual. Null if the network's values overflowed."
    )
    p_value: float = Field(
        description="The share of calibration images, and of this image itself, that score at least as high."
    )
    is_ood: bool = Field(description="Whether the image is out of distribution.")
    parts: dict[str, float] = Field(description="The p-values of the members of the guard.")
    reasons: Reasons | None = Field(
        None, description="If they were asked for: why the image was flagged. Null if it was not."
    )


class Answer(BaseModel):
    """The verdicts for all images of a request, in their order."""

    results: list[Result]


class Failure(BaseModel):
    """The reason of a refusal."""

    error: str


class Watched(BaseModel):
    """The state of the monitor."""

    alarm: bool
    alarm_at: int | None = Field(description="The number of images until the alarm.")
    since: int = Field(description="The number of images before the change, estimated.")
    strength: float
    images: int
    parts: dict[str, int] = Field(description="How many images each member flags since then.")
    classes: dict[str, int] = Field(description="How many images of each class are flagged since then.")


def one_image(body: bytes) -> list[bytes]:
    """The image of a body that is an image file."""
    return [body] if body else []


def several_images(body: bytes) -> list[bytes]:
    """The images of a body in JSON."""
    return decoded(_checked(Images, body).images)


def images_of_form(body: bytes, kind: str) -> list[bytes]:
    """The files of a form, as `curl -F file=@photo.jpg` sends it. `kind` is its Content-Type."""
    header = Message()
    header["Content-Type"] = kind
    boundary = header.get_boundary()
    if not boundary:
        raise HTTPException(400, "the form has no boundary: its Content-Type must name one")
    mark = b"\r\n--" + boundary.encode("utf-8", "surrogateescape")
    parts = (b"\r\n" + body).split(mark, MOST_PARTS + 1)[1:]
    if len(parts) > MOST_PARTS:
        raise HTTPException(413, f"the form is too large: it may have {MOST_PARTS:,} parts")
    files = [part.partition(b"\r\n\r\n") for part in parts if not part.startswith(b"--")]
    images = [content for head, _, content in files if b"filename" in head.lower()]
    if not images:
        raise HTTPException(400, "the form has no file: curl -F file=@photo.jpg")
    return images


# --- version 2 ---------------------------------------------------------------------------------------

INPUT = "image"
REASONS = "reasons"
"""An output of JSON texts, empty for images that are not flagged. A parameter of the request asks for it."""
Datatype = Literal["BYTES", "INT64", "FP64", "BOOL"]


class Tensor(BaseModel):
    """A tensor and its type."""

    name: str
    datatype: Datatype
    shape: list[int]


class Filled(Tensor):
    """A tensor with its values."""

    data: list[Any]


class Encoded(BaseModel):
    """The image files of a request."""

    name: Literal["image"]
    datatype: Literal["BYTES"]
    shape: list[int] = Field(min_length=1, max_length=1)
    data: list[str] = Field(min_length=1, description="Image files, base64.")
    parameters: dict[str, Any] = {}


class Wanted(BaseModel):
    """The name of a requested output."""

    name: str
    parameters: dict[str, Any] = {}


class InferenceRequest(BaseModel):
    """A request of the Open Inference Protocol."""

    id: str | None = None
    inputs: list[Encoded] = Field(min_length=1, max_length=1)
    outputs: list[Wanted] = []
    parameters: dict[str, Any] = Field({}, description="reasons: true says why images are flagged.")

    @property
    def reasons(self) -> bool:
        """Whether to say why images are flagged."""
        asked = self.parameters.get("reasons", False)
        if not isinstance(asked, bool):
            raise HTTPException(400, f"parameters.reasons must be true or false, not {asked!r:.80}")
        return asked

    def chosen(self, types: Mapping[str, Datatype]) -> dict[str, Datatype]:
        """The requested outputs; all, if none are requested."""
        names = [output.name for output in self.outputs] or list(types)
        if unknown := [name for name in names if name not in types]:
            raise HTTPException(400, f"there is no output {unknown[0]!r:.80}: choose from {', '.join(types)}")
        return {name: types[name] for name in names} | ({REASONS: "BYTES"} if self.reasons else {})

    def images(self) -> list[bytes]:
        """The image files."""
        (given,) = self.inputs
        if given.shape != [len(given.data)]:
            raise HTTPException(400, f"the shape is {given.shape}, but there are {len(given.data)} images")
        return decoded(given.data)


class InferenceAnswer(BaseModel):
    """An answer of the Open Inference Protocol."""

    model_config = ConfigDict(protected_namespaces=())  # the protocol's own names begin with model_
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[Filled]


class Metadata(BaseModel):
    """What the model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class ServerMetadata(BaseModel):
    """Name and version of the server."""

    name: str
    version: str
    extensions: list[str]


class Welcome(BaseModel):
    """What is here."""

    name: str
    version: str
    routes: dict[str, str]


class Live(BaseModel):
    """Whether the server is alive."""

    live: bool


class Ready(BaseModel):
    """Whether the server is ready."""

    ready: bool


_LARGEST = sys.float_info.max
_OUTPUTS: dict[str, tuple[Datatype, Callable[[Verdict], Any]]] = {
    "predicted": ("INT64", lambda verdict: verdict["predicted"]),
    "class": ("BYTES", lambda verdict: verdict["class"] or ""),
    "score": ("FP64", lambda verdict: _LARGEST if verdict["score"] is None else verdict["score"]),
    "p_value": ("FP64", lambda verdict: verdict["p_value"]),
    "is_ood": ("BOOL", lambda verdict: verdict["is_ood"]),
}


def output_types(parts: Sequence[str]) -> dict[str, Datatype]:
    """The names and types of all outputs. Each member of a guard has its p-value."""
    own: dict[str, Datatype] = {name: datatype for name, (datatype, _) in _OUTPUTS.items()}
    return own | {f"p_{name}": "FP64" for name in parts}


def outputs(verdicts: Sequence[Verdict], types: Mapping[str, Datatype]) -> list[Filled]:
    """The verdicts as tensors."""
    return [
        Filled(name=name, datatype=datatype, shape=[len(verdicts)], data=_column(verdicts, name))
        for name, datatype in types.items()
    ]


def _column(verdicts: Sequence[Verdict], name: str) -> list[Any]:
    if name == REASONS:
        return [json.dumps(verdict[name]) if verdict[name] else "" for verdict in verdicts]
    if name in _OUTPUTS:
        return [_OUTPUTS[name][1](verdict) for verdict in verdicts]
    return [verdict["parts"][name.removeprefix("p_")] for verdict in verdicts]


def inference_request(body: bytes) -> InferenceRequest:
    """The request in a body."""
    return _checked(InferenceRequest, body)


# --- both --------------------------------------------------------------------------------------------


def decoded(texts: Sequence[str]) -> list[bytes]:
    """The bytes behind base64."""
    try:
        return [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, ValueError):  # ValueError: letters beyond ASCII
        raise HTTPException(400, "an image is not base64") from None


def _checked(kind: type[Kind], body: bytes) -> Kind:
    if body.count(b",") >= MOST_VALUES:  # base64 has none
        raise HTTPException(413, f"the JSON is too large: it may have {MOST_VALUES:,} values")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise HTTPException(400, f"{place:.80}: {first['msg']:.200}") from None
