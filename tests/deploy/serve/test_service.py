"""Batches, admission, time-outs, and the end."""

import asyncio
import base64
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from urllib.parse import urlsplit

import pytest
from PIL import Image

import gramwatch
from gramwatch import InputError
from gramwatch.deploy.serve import Judge, Limits
from gramwatch.deploy.serve.server import _Joined
from gramwatch.inputs.demo import digits, small_mlp, train
from gramwatch.inputs.preprocessing import Preprocessing
from tests.deploy.serve.serving import png, serving, slow


def many(client, count: int) -> list[int]:
    with ThreadPoolExecutor(count) as pool:
        return [answer.status for answer in pool.map(client.score, [png()] * count)]


def test_requests_share_batches():
    judge = slow(0.05)
    with serving(judge) as client:
        assert many(client, 24) == [200] * 24
    sizes = judge.detector.sizes[1:]  # the first is the warm-up
    assert sum(sizes) == 24
    assert len(sizes) <= 8
    assert max(sizes) <= 32


def test_beyond_the_queue_the_answer_is_429_with_the_time_to_wait():
    with serving(slow(0.5), limits=Limits(queue=4, images=4, batch_size=2)) as client:
        statuses = many(client, 20)
        assert set(statuses) == {200, 429}
        assert 4 <= statuses.count(200) <= 8
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.post, "/score", {"images": _encoded(4)})
            time.sleep(0.2)
            refused = client.score(png())
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert first.result().status == 200
        assert client.score(png()).status == 200  # all places are free again


def _encoded(count: int) -> list[str]:
    return [base64.b64encode(png()).decode()] * count


def test_an_answer_is_sent_in_one_piece():
    """Headers and body: each piece would cost a system call, and wake the client."""
    sent = []

    class Noting:
        def write(self, data):
            sent.append(data)

        def close(self):
            sent.append("closed")

        def is_closing(self):
            return False

    async def answered():
        transport = _Joined(Noting(), asyncio.get_running_loop())
        transport.write(b"headers ")
        transport.write(b"body")
        assert not sent
        await asyncio.sleep(0)
        assert sent == [b"headers body"]
        assert not transport.is_closing()
        transport.write(b"last")
        transport.close()
        await asyncio.sleep(0)

    asyncio.run(answered())
    assert sent == [b"headers body", b"last", "closed"]


def test_a_verdict_that_takes_too_long_is_given_up_and_the_place_is_freed_later():
    judge = slow(0.4)
    with serving(judge, limits=Limits(queue=1, images=1, judge_seconds=0.1)) as client:
        late = client.score(png())
        assert (late.status, late.json) == (503, {"error": "the verdict takes too long"})
        assert client.score(png()).status == 429
        judge.detector.seconds = 0
        time.sleep(0.5)
        assert client.score(png()).status == 200


def test_a_slow_body_ends_with_408_and_others_are_served_meanwhile():
    with serving(slow(), limits=Limits(read_seconds=0.5)) as client:
        with socket.create_connection(_address(client)) as sender:
            sender.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
            assert client.score(png()).status == 200
            assert b"408" in sender.recv(100)
        assert _waiting(client) == 0


def test_slow_headers_are_cut_off():
    with serving(slow(), read_seconds=0.5) as client, socket.create_connection(_address(client)) as sender:
        begin = time.monotonic()
        sender.settimeout(20)
        sender.sendall(b"POST /score HTTP/1.1\r\nHo")
        assert sender.recv(100) == b""
        assert 0.3 < time.monotonic() - begin < 10


def test_a_connection_that_is_used_again_is_not_cut_off():
    with serving(slow(0.8), read_seconds=0.5) as client:
        connection = client.connection()
        for _ in range(2):
            connection.request("POST", "/score", png())
            answer = connection.getresponse()
            assert (answer.status, len(answer.read()) > 0) == (200, True)
        connection.close()


@pytest.mark.parametrize("body", [b"abc", None])
def test_a_client_that_goes_away_takes_nothing_with_it(body):
    judge = slow(0.3)
    with serving(judge, limits=Limits(queue=8, images=8)) as client:
        image = png()
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(client.score, image) for _ in range(3)]
            with socket.create_connection(_address(client)) as sender:
                head = f"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(image)}\r\n\r\n"
                sender.sendall(head.encode() + (body or image))
                time.sleep(0.1)
            assert [job.result().status for job in others] == [200] * 3
        time.sleep(0.5)
        assert _waiting(client) == 0
        assert client.score(image).status == 200


def test_the_end_finishes_what_was_accepted():
    with serving(slow(0.8)) as client, ThreadPoolExecutor(8) as pool:
        accepted = [pool.submit(client.score, png()) for _ in range(8)]
        time.sleep(0.3)
        client.server.should_exit = True
        assert [job.result().status for job in accepted] == [200] * 8
        time.sleep(0.5)
        with pytest.raises(ConnectionRefusedError):
            client.score(png())


def _address(client) -> tuple[str, int]:
    place = urlsplit(client.url)
    return place.hostname, place.port


def _waiting(client) -> float:
    (line,) = [
        line
        for line in client.get("/metrics").body.decode().splitlines()
        if line.startswith("gramwatch_waiting_images ")
    ]
    return float(line.split()[1])


# --- the state of the monitor ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guard():
    data, model = digits(), small_mlp()
    train(model, data.train, data.train_labels, epochs=5)
    guard = gramwatch.Guard(model, members=["energy", "gram"])
    return guard.fit([data.train]).calibrate([data.validation])


def watched(guard, state) -> Judge:
    prepare = Preprocessing((8, 8), 8, "bilinear", (0.0,), (1.0,))
    return Judge(guard, prepare, monitor=gramwatch.Monitor(guard), state=state)


def test_the_state_of_the_monitor_is_saved_regularly_and_at_the_end(guard, tmp_path):
    state = tmp_path / "state.safetensors"
    with serving(watched(guard, state), save_seconds=0.2) as client:
        assert client.score(png()).status == 200
        until = time.monotonic() + 20
        while not state.exists() or gramwatch.Monitor.load(state, guard).seen < 1:
            assert time.monotonic() < until
            time.sleep(0.05)
    with serving(watched(guard, state), save_seconds=1000) as client:
        assert [client.score(png()).status for _ in range(3)] == [200] * 3
    assert gramwatch.Monitor.load(state, guard).seen == 3


def test_the_state_of_the_monitor_is_read_between_batches(guard):
    judge, read = watched(guard, None), []
    monitor = judge.monitor

    class Noting:
        def __getattr__(self, name):
            read.append(threading.current_thread().name)
            return getattr(monitor, name)

    judge.monitor = Noting()
    with serving(judge) as client:
        read.clear()
        assert client.get("/monitor").json["images"] == 0
    assert {name.partition("_")[0] for name in read} == {"judge"}


def test_a_disk_that_takes_no_state_stops_nothing(guard, tmp_path):
    with serving(watched(guard, tmp_path / "missing" / "state"), save_seconds=0.05) as client:
        time.sleep(0.5)
        assert client.score(png()).status == 200
        text = client.get("/metrics").body.decode()
    (line,) = [row for row in text.splitlines() if row.startswith("gramwatch_monitor_failed_saves_total ")]
    assert float(line.split()[1]) >= 1


def test_many_threads_ask_at_once_and_each_gets_its_own_answer():
    """The answer shows the brightness of the image that was sent."""
    wrong = []

    def client_of(number: int) -> None:
        for value in range(number, 256, 16):
            (result,) = client.score(png(value)).json["results"]
            if abs(result["score"] - (value / 127.5 - 1)) > 1e-6:
                wrong.append((value, result))

    with serving(slow(0.002)) as client:
        threads = [threading.Thread(target=client_of, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"queue": 0}, "queue must be positive, got 0"),
        ({"batch_size": 1}, "batch_size must be at least 2"),
        ({"images": 200}, "only 128 may wait"),
    ],
)
def test_limits_are_checked(given, reason):
    with pytest.raises(InputError, match=reason):
        Limits(**given)


# --- what takes long to read or to decode ------------------------------------------------------------


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def flat(pixels: int) -> bytes:
    """A file of a few kilobytes."""
    return file_of(Image.new("L", (1000, pixels // 1000)))


def json_of(*images: bytes) -> dict[str, list[str]]:
    return {"images": [base64.b64encode(image).decode() for image in images]}


def test_a_request_may_have_so_many_pixels_in_all():
    with serving(slow()) as client:
        begin = time.monotonic()
        answer = client.post("/score", json_of(*[flat(49_000_000)] * 32))
        assert (answer.status, time.monotonic() - begin < 5) == (413, True)
        assert "a request may have 100,000,000" in answer.json["error"]
        assert client.post("/score", json_of(*[flat(100_000)] * 32)).status == 200
    with serving(slow(), limits=Limits(request_pixels=20_000)) as client:
        assert client.post("/score", json_of(flat(10_000))).status == 200
        assert client.post("/score", json_of(flat(10_000), flat(10_000))).status == 413
        assert client.score(file_of(Image.new("L", (1, 5000)))).status == 413  # rows cost, too
        plain = b"P2 50 50 255\n" + b"1 " * 2500  # Python decodes it
        assert client.score(plain).status == 413


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/score", b'{"images": [' + b'"",' * 4_000_000 + b'""]}', 413),
        ("/score", b'{"images": [' + b"[" * 4_000_000, 400),
        ("/score", b'{"images": ' + b"1" * 4_000_000 + b"}", 400),
        (
            "/v2/models/guard/infer",
            b'{"parameters": {' + b",".join(b'"%d":0' % n for n in range(1_000_000)) + b"}}",
            413,
        ),
        ("/score", b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0teXt\0\0\0\0" * 300_000, 400),
    ],
)
def test_bodies_of_millions_of_small_values_are_refused_at_once(path, body, status):
    kind = "image/png" if body[0] == 0x89 else "application/json"
    with serving(slow()) as client:
        begin = time.monotonic()
        answer = client.ask("POST", path, body, {"Content-Type": kind})
        assert (answer.status, answer.json.keys()) == (status, {"error"})
        assert time.monotonic() - begin < 3


def test_small_images_do_not_wait_for_large_ones(monkeypatch):
    """Large images are decoded one after the other, beside the others."""
    judge = slow()
    prepared, go = Judge.prepared, threading.Event()

    def held_up(self, image):
        if image.width > 100:
            go.wait(20)
        return prepared(self, image)

    monkeypatch.setattr(Judge, "prepared", held_up)
    with serving(judge) as client, ThreadPoolExecutor(4) as pool:
        large = [pool.submit(client.score, flat(17_000_000)) for _ in range(2)]
        time.sleep(0.3)
        assert client.score(png()).status == 200
        assert not any(job.done() for job in large)
        assert _waiting(client) == 2 * 5  # pixels take places
        go.set()
        assert [job.result().status for job in large] == [200] * 2
        assert _waiting(client) == 0


def test_decoding_that_takes_too_long_is_given_up():
    odd = b"P6 1300 1300 254\n" + bytes(5_070_000)  # Python decodes it, in four seconds
    with serving(slow(), limits=Limits(judge_seconds=0.2, request_pixels=10**9)) as client:
        begin = time.monotonic()
        late = client.score(odd)
        assert (late.status, late.json) == (503, {"error": "the verdict takes too long"})
        assert client.score(png()).status == 200
        until = time.monotonic() + 10
        while _waiting(client):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert time.monotonic() - begin < 3  # the thread has stopped


def test_too_little_memory_is_503(monkeypatch):
    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr(Judge, "prepared", exhausted)
    with serving(slow()) as client:
        answer = client.score(png())
        assert (answer.status, answer.json["error"]) == (503, "there is not enough memory: try again later")
        assert _waiting(client) == 0


def test_an_image_of_the_largest_size_is_accepted_whatever_the_queue():
    with serving(slow(), limits=Limits(queue=2, images=1)) as client:
        assert client.score(flat(20_000_000)).status == 200
