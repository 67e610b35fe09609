"""The page of the demo, made once for all tests and served on a free port."""

import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from gramwatch.deploy.live import Examiner, Shown, create_page
from gramwatch.deploy.live.demo import demo_page
from gramwatch.deploy.serve import server_of
from tests.deploy.serve.serving import Client


@pytest.fixture(scope="session")
def demo() -> tuple[Examiner, Shown]:
    return demo_page(lambda _: None, progress=False, epochs=15)


@pytest.fixture(scope="session")
def page(demo) -> Iterator[Client]:
    examiner, shown = demo
    addresses: list[str] = []
    server = server_of(create_page(examiner, shown), port=0, started=addresses.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not addresses:
        assert thread.is_alive()
        time.sleep(0.01)
    yield Client(addresses[0], server)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
