"""The routes of the page."""

import json
import re
import time
from io import BytesIO

import pytest
from fastapi import HTTPException
from PIL import Image
from starlette.datastructures import Headers

from gramwatch.deploy.live import app as live
from gramwatch.deploy.live import create_page, opened_port
from gramwatch.errors import InputError


def judge(page, data, **headers):
    return page.ask("POST", "/judge", data, {"Content-Type": "application/octet-stream", **headers})


def test_the_page_asks_this_machine_alone(page):
    answered = page.get("/")
    assert answered.status == 200
    assert answered.headers["content-type"].startswith("text/html")
    text = answered.body.decode()
    for link in re.findall(r'(?:src|href)="([^"]+)"', text):
        assert link.startswith("#") or page.get(f"/{link}").status == 200
    policy = answered.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'")
    assert "http" not in policy
    for name in ("page.html", "page.css", "page.js"):
        external = re.findall(r"https?://[^\s\"'`)]+", (live.PAGE / name).read_text(encoding="utf-8"))
        assert set(external) <= {"http://127.0.0.1", "http://localhost."}  # named in a message


def test_nothing_is_kept(page, demo):
    for answered in (page.get("/"), page.get("/about"), judge(page, demo[1].examples[0].data)):
        assert answered.status == 200
        assert answered.headers["cache-control"] == "no-store"


def test_the_page_says_what_its_guard_is(page, demo):
    about = page.get("/about").json
    assert about["title"] == "Digits 0 to 7"
    assert ["fitted on", "721 handwritten digits, 0 to 7"] in about["facts"]
    assert about["fill"] is True
    assert len(about["examples"]) == len(demo[1].examples) == 18
    for number, example in enumerate(demo[1].examples):
        assert page.get(f"/examples/{number}").body == example.data
    assert page.get("/examples/18").json == {"error": "there is no such example"}
    assert page.get("/examples/-1").status == 404


def test_an_image_gets_its_answer(page, demo):
    examiner, shown = demo
    answered = judge(page, shown.examples[10].data)
    assert answered.status == 200
    assert answered.json == json.loads(json.dumps(examiner(shown.examples[10].data)))


def test_what_is_no_image_is_refused_in_words(page):
    answered = judge(page, b"no image")
    assert answered.status == 400
    assert answered.json["error"].startswith("not an image of a known format (JPEG, PNG")


def test_a_file_that_is_too_large_is_refused(page, monkeypatch):
    monkeypatch.setattr(live, "MOST_BYTES", 2**20)
    answered = judge(page, b"x" * (2**20 + 1))
    assert answered.status == 413
    assert answered.json == {"error": "the file is too large: it may have 1 MiB"}


def test_too_many_at_once_are_refused(page, demo, monkeypatch):
    monkeypatch.setattr(live, "MOST_WAITING", 0)
    assert judge(page, demo[1].examples[0].data).status == 429


def test_a_fault_of_the_guard_is_one_line_without_a_trace(page, demo, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(type(demo[0]), "__call__", fail)
    answered = judge(page, demo[1].examples[0].data)
    assert answered.status == 500
    assert answered.json == {"error": "the guard failed on this image: the terminal says why"}


def test_other_names_of_this_machine_are_refused(page):
    """A site elsewhere could otherwise have its name lead here, and read what the page says."""
    assert page.get("/about", Host="evil.example").status == 403
    assert page.get("/about", Host="localhost").status == 200


def test_pages_of_other_sites_may_not_ask(page, demo):
    image = demo[1].examples[0].data
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert judge(page, image, **headers).status == 403
    own = {"Origin": page.url, "Sec-Fetch-Site": "same-origin"}
    assert judge(page, image, **own).status == 200


def test_images_that_take_much_memory_or_time_are_refused(page):
    for size in ((50_000_001, 1), (1, 49_000_000)):
        file = BytesIO()
        Image.new("1", size).save(file, "PNG")
        begin = time.monotonic()
        answered = judge(page, file.getvalue())
        assert (answered.status, answered.json["error"][:4]) == (400, "too "), size
        assert time.monotonic() - begin < 5


def test_a_slow_image_is_refused(demo, monkeypatch):
    import asyncio

    monkeypatch.setattr(live, "READ_SECONDS", 0.05)

    class Slow:
        headers = Headers()

        async def stream(self):
            await asyncio.sleep(30)
            yield b""

    desk, start = live.Desk(demo[0]), time.monotonic()
    with pytest.raises(HTTPException) as refused:
        asyncio.run(desk.judged(Slow()))
    assert refused.value.status_code == 408
    assert time.monotonic() - start < 20
    assert desk.waiting == 0


def test_a_port_is_taken_once_and_on_this_machine_only(demo):
    with opened_port(0) as first:
        host, port = first.getsockname()
        assert host == "127.0.0.1"
        first.listen()
        with pytest.raises(InputError, match=f"port {port} cannot be used .*: name another, or 0 for any"):
            opened_port(port)
    assert create_page(*demo).openapi_url is None
