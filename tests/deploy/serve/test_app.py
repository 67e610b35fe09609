"""The routes, as clients see them."""

import base64
import json
import math
from io import BytesIO

import pytest
import torch
from PIL import Image

import gramwatch
from gramwatch.deploy.serve import Judge, Limits
from gramwatch.deploy.serve.judge import Asked
from gramwatch.deploy.serve.protocol import Answer, Result
from gramwatch.inputs.decoding import FORMATS
from gramwatch.inputs.demo import digits, small_mlp, train
from gramwatch.inputs.preprocessing import Preprocessing
from tests.deploy.serve.serving import Slow, png, serving, slow

TOKEN = "a token of some length"


def encoded(*images: bytes) -> list[str]:
    return [base64.b64encode(image).decode() for image in images]


def inference(*images: bytes, **others: object) -> dict[str, object]:
    given = {"name": "image", "datatype": "BYTES", "shape": [len(images)], "data": encoded(*images)}
    return {"inputs": [given], **others}


@pytest.fixture(scope="module")
def client():
    with serving(slow(), limits=Limits(images=4, body_bytes=20_000, pixels=1000)) as client:
        yield client


@pytest.fixture(scope="module")
def guard():
    torch.manual_seed(0)
    data, model = digits(), small_mlp()
    train(model, data.train, data.train_labels, epochs=10)
    return gramwatch.Guard(model).fit(data.train.split(128)).calibrate(data.validation.split(128))


GREY = Preprocessing((8, 8), 8, "bilinear", (0.0,), (1.0,))


def test_the_verdicts_are_those_of_the_guard(guard):
    monitor = gramwatch.Monitor(guard)
    judge = Judge(guard, GREY, list("01234567"), monitor)
    images = [png(value) for value in (0, 90, 200)]
    detection = guard(torch.stack([judge.read(image, 100) for image in images]))
    with serving(judge) as client:
        results = client.post("/score", {"images": encoded(*images)}).json["results"]
        assert [row["score"] for row in results] == pytest.approx(detection.score.tolist())
        assert [row["p_value"] for row in results] == pytest.approx(detection.p_value.tolist())
        assert [row["is_ood"] for row in results] == detection.is_ood.tolist()
        assert [row["class"] for row in results] == [str(int(c)) for c in detection.predicted]
        assert results[1]["parts"] == pytest.approx({n: float(p[1]) for n, p in detection.parts.items()})
        assert client.score(images[1]).json["results"][0]["predicted"] == int(detection.predicted[1])
        watched = client.get("/monitor").json
        assert (watched["images"], watched["alarm"]) == (4, False)
        assert watched["parts"].keys() == guard.members.keys()
        assert watched["classes"].keys() <= set("01234567")
        assert sum(watched["classes"].values()) == sum(row.flagged for row in monitor.classes)
        text = client.get("/metrics").body.decode()
        assert "gramwatch_monitor_images 4.0" in text
        assert "gramwatch_images_total 4.0" in text
        assert "gramwatch_monitor_alarm 0.0" in text
    assert monitor.seen == 4


def test_an_image_and_several(client):
    (result,) = client.score(png(255)).json["results"]
    assert result == {
        "predicted": 0, "class": "bright", "score": 1.0, "p_value": 0.0, "is_ood": True,
        "parts": {"mean": 0.0},
    }  # fmt: skip
    answer = client.post("/score", {"images": encoded(png(0), png(255))})
    assert [row["class"] for row in answer.json["results"]] == ["dark", "bright"]


def test_the_open_inference_protocol(client):
    assert client.get("/v2").json["name"] == "gramwatch"
    metadata = client.get("/v2/models/guard").json
    assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    names = [output["name"] for output in metadata["outputs"]]
    assert names == ["predicted", "class", "score", "p_value", "is_ood", "p_mean"]
    answer = client.post("/v2/models/guard/infer", inference(png(0), png(255), id="seven")).json
    assert (answer["id"], answer["model_name"]) == ("seven", "guard")
    assert {output["name"]: output["data"] for output in answer["outputs"]} == {
        "predicted": [1, 0], "class": ["dark", "bright"], "score": [-1.0, 1.0], "p_value": [1.0, 0.0],
        "is_ood": [False, True], "p_mean": [1.0, 0.0],
    }  # fmt: skip
    assert {output["name"]: output["datatype"] for output in answer["outputs"]} == {
        output["name"]: output["datatype"] for output in metadata["outputs"]
    }
    chosen = client.post("/v2/models/guard/infer", inference(png(0), outputs=[{"name": "score"}])).json
    assert [output["name"] for output in chosen["outputs"]] == ["score"]
    assert client.get("/v2/models/guard/ready").json == {"ready": True}


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/score", {"images": []}, 400, "images: List should have at least 1 item"),
        ("/score", {"images": ["no base64!"]}, 400, "an image is not base64"),
        ("/score", {"images": ["ümlaut"]}, 400, "an image is not base64"),
        ("/score", {"images": ["aGVsbG8="]}, 400, f"image 0: not an image of a known format ({FORMATS[0]}"),
        ("/score", {"images": encoded(png(), png()[:-24])}, 400, "image 1: cannot be read"),
        ("/score", {"images": encoded(*[png()] * 5)}, 413, "there are 5 images: a request may have 4"),
        ("/score", {"images": encoded(png(side=40))}, 400, "image 0: too large: it has more than 1,000"),
        ("/score", {"images": ["A" * 40_000]}, 413, "the body is too large: it may have 20,000 bytes"),
        ("/score", {"pictures": []}, 400, "images: Field required"),
        ("/v2/models/guard/infer", {"inputs": []}, 400, "inputs: List should have at least 1 item"),
        ("/v2/models/guard/infer", inference(png(), outputs=[{"name": "x"}]), 400, "there is no output 'x'"),
        ("/v2/models/other/infer", inference(png()), 404, "there is no such model"),
    ],
)
def test_what_is_wrong_is_one_line(client, path, body, status, reason):
    answer = client.post(path, body)
    assert (answer.status, answer.json.keys()) == (status, {"error"})
    assert answer.json["error"].startswith(reason)


def ordinary_and_flagged(guard) -> tuple[bytes, bytes]:
    """A digit and noise."""
    images = [digits().test[0], torch.rand(1, 8, 8)]
    files = [BytesIO(), BytesIO()]
    for image, file in zip(images, files, strict=True):
        Image.fromarray(image[0].mul(255).round().byte().numpy()).save(file, "PNG")
    return files[0].getvalue(), files[1].getvalue()


def test_reasons_are_given_on_request_for_images_that_are_flagged(guard):
    images = ordinary_and_flagged(guard)
    monitor = gramwatch.Monitor(guard)
    with serving(Judge(guard, GREY, monitor=monitor)) as client:
        plain = client.post("/score", {"images": encoded(*images)}).json["results"]
        answer = client.post("/score?reasons=true", {"images": encoded(*images)}).json["results"]
        asked = client.post("/v2/models/guard/infer", inference(*images, parameters={"reasons": True})).json
        without = client.post("/v2/models/guard/infer", inference(*images)).json
        text = client.get("/metrics").body.decode()
    assert [row["is_ood"] for row in plain] == [False, True]
    assert ["reasons" in row for row in plain] == [False, False]
    assert answer[0]["reasons"] is None
    reasons = answer[1]["reasons"]
    explanation = guard.explain(torch.stack([judge_input(image) for image in images]))
    assert reasons["sentences"] == explanation.sentences(1)
    assert sum(reasons["members"].values()) == pytest.approx(answer[1]["score"])
    assert reasons["members"].keys() == guard.members.keys()
    largest = reasons["taps"]
    assert 0 < len(largest) <= 5
    assert [tap["contribution"] for tap in largest] == sorted(
        (t["contribution"] for t in largest), reverse=True
    )
    column = explanation.tap_names[largest[0]["member"]].index(largest[0]["tap"])
    assert largest[0]["contribution"] == pytest.approx(
        float(explanation.taps[largest[0]["member"]][1, column])
    )
    assert [{**row, "reasons": None} for row in plain] == [{**row, "reasons": None} for row in answer]
    (output,) = [output for output in asked["outputs"] if output["name"] == "reasons"]
    assert (output["datatype"], output["shape"], output["data"][0]) == ("BYTES", [2], "")
    assert json.loads(output["data"][1]) == reasons
    assert "reasons" not in [output["name"] for output in without["outputs"]]
    assert monitor.seen == 8  # each image once
    assert "gramwatch_reasons_total 2.0" in text


def test_answers_are_as_openapi_describes_them(guard):
    class Strict(Answer, extra="forbid"):
        results: list[StrictResult]

    with serving(Judge(guard, GREY, classes=list("01234567"))) as client:
        for path in ("/score", "/score?reasons=true"):
            answer = client.post(path, {"images": encoded(*ordinary_and_flagged(guard))})
            assert answer.headers["content-type"] == "application/json"
            Strict.model_validate_json(answer.body, strict=True)


class StrictResult(Result, extra="forbid"):
    """A verdict without other fields."""


def judge_input(image: bytes) -> torch.Tensor:
    return Judge(lambda _: None, GREY).read(image, 100)


def test_reasons_for_an_image_that_overflows_are_words(guard):
    class Overflow:
        def __call__(self, inputs):
            detection = guard(inputs)
            detection.score.fill_(math.inf)
            detection.is_ood.fill_(True)
            return detection

        def explain(self, inputs, places):
            explanation = guard.explain(inputs, places=places)
            explanation.taps["gram"][:, 0] = math.inf
            return explanation

    with serving(Judge(Overflow(), GREY)) as client:
        (result,) = client.ask("POST", "/score?reasons=1", png()).json["results"]
    assert "not finite" in " ".join(result["reasons"]["sentences"])
    assert result["reasons"]["members"] == {}
    assert all(math.isfinite(tap["contribution"]) for tap in result["reasons"]["taps"])


def test_explanations_that_take_too_much_memory_are_made_in_halves(guard):
    sizes = []

    class Large:
        def __call__(self, inputs):
            return guard(inputs)

        def explain(self, inputs, places):
            sizes.append(len(inputs))
            if len(inputs) > 2:
                raise gramwatch.InputError("too many to be explained at once")
            return guard.explain(inputs, places=places)

    noise = torch.rand(5, 1, 8, 8)
    verdicts = Judge(Large(), GREY)([Asked(image, True) for image in noise])
    assert all(verdict["is_ood"] for verdict in verdicts)
    assert sizes == [5, 2, 3, 1, 2]
    want = guard.explain(noise)
    assert [v["reasons"]["sentences"] for v in verdicts] == [want.sentences(i) for i in range(5)]


def test_an_image_with_reasons_takes_two_places(guard):
    with serving(Judge(guard, GREY), limits=Limits(queue=5, images=4)) as client:
        assert client.post("/score?reasons=true", {"images": encoded(*[png()] * 2)}).status == 200
        assert client.post("/score", {"images": encoded(*[png()] * 4)}).status == 200
        refused = client.post("/score?reasons=true", {"images": encoded(*[png()] * 3)})
        assert (refused.status, refused.json["error"]) == (
            413,
            "there are 3 images: with reasons, a request may have 2",
        )
        text = client.get("/metrics").body.decode()
    assert "gramwatch_waiting_images 0.0" in text


def test_reasons_that_cannot_be_given_are_refused(client):
    asked = inference(png(), parameters={"reasons": True})
    for answer in (
        client.ask("POST", "/score?reasons=true", png()),
        client.post("/v2/models/guard/infer", asked),
    ):
        assert answer.status == 400
        assert "this guard gives no reasons" in answer.json["error"]
    answer = client.ask("POST", "/score?reasons=perhaps", png())
    assert (answer.status, answer.json["error"].startswith("reasons: ")) == (400, True)
    answer = client.post("/v2/models/guard/infer", inference(png(), parameters={"reasons": "yes"}))
    assert answer.json == {"error": "parameters.reasons must be true or false, not 'yes'"}


def test_a_shape_that_does_not_fit_is_refused(client):
    body = inference(png())
    body["inputs"][0]["shape"] = [2]
    assert "there are 1 images" in client.post("/v2/models/guard/infer", body).json["error"]


def test_bodies_that_are_no_json_and_no_image(client):
    answer = client.ask("POST", "/score", b"{", {"Content-Type": "application/json; charset=utf-8"})
    assert (answer.status, answer.json["error"].startswith("the body: Invalid JSON")) == (400, True)
    assert client.score(b"").json == {"error": "there is no image"}
    assert client.score(b"text").status == 400


def test_a_body_of_unknown_length_is_cut_off(client):
    pieces = iter([b"x" * 8000] * 100)
    answer = client.ask("POST", "/score", pieces)  # in chunks
    assert answer.status == 413


def test_errors_show_no_trace_and_no_path(capfd):
    class Broken(Slow):
        def __call__(self, inputs):
            if inputs.any():
                raise RuntimeError("a secret in /home/me")
            return super().__call__(inputs)

    judge = slow()
    judge.detector = Broken()
    with serving(judge) as client:
        answer = client.score(png(255))
        assert (answer.status, answer.json) == (500, {"error": "internal error"})
        assert client.score(png(127)).status in (200, 500)
        assert client.get("/nothing").json == {"error": "Not Found"}
    assert "a secret" in capfd.readouterr().err  # the operator sees it


def test_an_infinite_score_is_null():
    class Overflow(Slow):
        def __call__(self, inputs):
            detection = super().__call__(inputs)
            detection.score.fill_(math.inf)
            return detection

    judge = slow()
    judge.detector = Overflow()
    with serving(judge) as client:
        assert client.score(png()).json["results"][0]["score"] is None
        answer = client.post("/v2/models/guard/infer", inference(png(), outputs=[{"name": "score"}]))
        assert answer.json["outputs"][0]["data"] == [pytest.approx(1.7976931348623157e308)]


def test_a_token_is_needed_for_all_but_health():
    with serving(slow(), token=TOKEN) as client:
        assert client.get("/healthz").json == {"live": True}
        assert client.get("/readyz").json == {"ready": True}
        for path in ("/metrics", "/v2", "/v2/models/guard"):
            refused = client.get(path)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert client.get(path, Authorization=f"Bearer {TOKEN[:-1]}").status == 401
            assert client.get(path, Authorization=f"Basic {TOKEN}").status == 401
            assert client.get(path, Authorization=f"Bearer {TOKEN}").status == 200
        assert client.score(png()).json == {"error": "a valid token is needed"}


def test_tokens_are_compared_in_constant_time(monkeypatch):
    import hmac

    compared = []

    def noted(given, expected):
        compared.append((given, expected))
        return given == expected

    monkeypatch.setattr(hmac, "compare_digest", noted)
    with serving(slow(), token=TOKEN) as client:
        assert client.get("/v2", Authorization="Bearer wrong").status == 401
    assert compared == [(b"wrong", TOKEN.encode())]


def test_openapi_describes_every_route(client):
    described = client.get("/openapi.json").json
    assert described["paths"].keys() == {
        "/", "/healthz", "/readyz", "/score", "/metrics", "/v2", "/v2/health/live", "/v2/health/ready",
        "/v2/models/{model}", "/v2/models/{model}/ready", "/v2/models/{model}/infer",
    }  # fmt: skip
    score = described["paths"]["/score"]["post"]
    assert score["requestBody"]["content"].keys() == {
        "image/*",
        "application/octet-stream",
        "application/json",
        "multipart/form-data",
    }
    assert score["responses"].keys() >= {"200", "400", "408", "413", "429", "503"}
    assert "$ref" not in json.dumps(described["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"])


def test_metrics_count_requests_images_and_flags():
    with serving(slow()) as client:
        for value in (0, 255, 255):
            assert client.score(png(value)).status == 200
        client.score(b"no image")
        text = client.get("/metrics").body.decode()
    for line in (
        'gramwatch_requests_total{route="/score",status="200"} 3.0',
        'gramwatch_requests_total{route="/score",status="400"} 1.0',
        "gramwatch_images_total 3.0",
        "gramwatch_flagged_total 2.0",
        "gramwatch_flagged_share 0.6666666666666666",
        "gramwatch_waiting_images 0.0",
        "gramwatch_batch_images_count 3.0",
    ):
        assert line in text
    assert 'gramwatch_request_seconds_count{route="/score"} 4.0' in text
    assert "monitor_alarm" not in text


def test_the_root_says_what_is_here(client):
    answer = client.get("/")
    assert (answer.status, answer.json["name"]) == (200, "gramwatch")
    paths = client.get("/openapi.json").json["paths"]
    for route in answer.json["routes"]:
        for path in route.partition(" ")[2].split("?")[0].split(", "):
            assert path == "/openapi.json" or path.replace("models/guard", "models/{model}") in paths


def form(*parts: tuple[str, bytes], boundary: str = "xyz") -> tuple[bytes, dict[str, str]]:
    """A form as `curl -F` and browsers send it."""
    pieces = [
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        for head, content in parts
    ]
    body = b"".join(pieces) + f"--{boundary}--\r\n".encode()
    return body, {"Content-Type": f'multipart/form-data; boundary="{boundary}"'}


def test_files_of_a_form_are_judged(client):
    file = 'name="file"; filename="x.png"'
    answer = client.ask("POST", "/score", *form((file, png(0)), ('name="note"', b"hello"), (file, png(255))))
    assert [row["class"] for row in answer.json["results"]] == ["dark", "bright"]
    tricky = png(255) + b"\r\n--xy\r\n\r\n"  # Pillow reads no further than the end of the image
    assert client.ask("POST", "/score", *form((file, tricky))).json["results"][0]["class"] == "bright"


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (form(('name="note"', b"hello")), 400, "the form has no file: curl -F file=@photo.jpg"),
        (form(), 400, "the form has no file"),
        ((b"", {"Content-Type": "multipart/form-data"}), 400, "the form has no boundary"),
        (form(('name="file"; filename="x"', b"text")), 400, "image 0: not an image of a known format"),
        (form(*[('filename="x"', png())] * 5), 413, "there are 5 images: a request may have 4"),
        ((b"--x\r\n" * 3000, {"Content-Type": "multipart/form-data; boundary=x"}), 413, "the form is too"),
    ],
)
def test_forms_without_images_are_refused_in_words(client, sent, status, reason):
    answer = client.ask("POST", "/score", *sent)
    assert answer.status == status
    assert answer.json["error"].startswith(reason)


def test_pages_of_other_sites_may_not_ask(client):
    """A browser sends such a post, whatever site the page is of. It says whose page it is."""
    own = client.url
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": own + "1"},
        {"Origin": own, "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this machine
    ):
        answer = client.ask("POST", "/score", png(), headers)
        assert (answer.status, answer.json) == (403, {"error": "a page of another site may not ask"})
    for headers in (
        {"Origin": own},
        {"Origin": own, "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert client.ask("POST", "/score", png(), headers).status == 200


def test_other_names_of_this_machine_are_refused(client):
    """A site could otherwise give its own name the address of this machine, and read the answers."""
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "[", ""):
        answer = client.get("/metrics", Host=host)
        assert answer.status in (400, 403), host
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
        assert client.get("/metrics", Host=host).status == 200


def test_with_a_token_or_if_anyone_may_ask_all_names_are_known():
    """A page elsewhere does not know the token."""
    for options in ({"token": TOKEN}, {"hosts": ["*"]}, {"hosts": ["judge.example"]}):
        with serving(slow(), **options) as client:
            asked = client.get("/metrics", Host="judge.example:80", Authorization=f"Bearer {TOKEN}")
            assert asked.status == 200
