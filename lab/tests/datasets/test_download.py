"""Downloads: resumed, checked, unpacked; `gramwatch data`. Against a server on this machine."""

import hashlib
import io
import re
import tarfile
import threading
import urllib.request
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from gramwatch import DataError, GramwatchWarning
from gramwatch.cli.app import app
from gramwatch_lab import datasets
from gramwatch_lab.datasets import CATALOGUE, Download, Source, download
from gramwatch_lab.datasets.folder import read_folder

CONTENT = bytes(range(256)) * 20_000


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files`; can refuse ranges, or end the connection early."""

    def do_GET(self):
        content = self.server.files.get(self.path)
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if asked and self.server.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        if self.server.tells_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : self.server.stop_after])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.ranges, server.stop_after = {"/file.bin": CONTENT}, [], True, None
    server.tells_length = True
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def offer(server, content=CONTENT, name="file.bin", **more):
    server.files[f"/{name}"] = content
    more.setdefault("md5", hashlib.md5(content).hexdigest())
    return Download(f"{server.url}/{name}", cited="this test", **more)


def test_a_file_is_fetched_and_no_part_is_left(server, tmp_path):
    download.fetch(offer(server), tmp_path / "new" / "file.bin")
    assert (tmp_path / "new" / "file.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.bin"]


def test_an_interrupted_download_is_continued(server, tmp_path):
    path = tmp_path / "file.bin"
    server.stop_after = 1_000_000
    with pytest.raises(
        DataError, match=r"file\.bin could not be downloaded \(.*1,000,000 of 5,120,000 bytes"
    ):
        download.fetch(offer(server), path)
    assert not path.exists()
    server.stop_after = None
    download.fetch(offer(server), path)
    assert server.asked == [None, "bytes=1000000-"]
    assert path.read_bytes() == CONTENT


def test_a_part_that_is_whole_already_and_a_server_without_ranges(server, tmp_path):
    path, part = tmp_path / "file.bin", tmp_path / "file.bin.part"
    part.write_bytes(CONTENT)
    download.fetch(offer(server), path)
    assert path.read_bytes() == CONTENT
    path.unlink()
    server.ranges = False
    part.write_bytes(CONTENT[:500])
    download.fetch(offer(server), path)
    assert path.read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind(server, tmp_path):
    with pytest.raises(
        DataError, match=rf"its MD5 is {hashlib.md5(CONTENT).hexdigest()}, the published one is 00"
    ):
        download.fetch(offer(server, md5="0" * 32), tmp_path / "file.bin")
    assert list(tmp_path.iterdir()) == []


def test_without_network_the_error_names_address_file_and_folder(server, tmp_path):
    server.files.clear()
    for url in (f"{server.url}/file.bin", "http://127.0.0.1:9/file.bin"):
        with pytest.raises(DataError) as raised:
            download.fetch(Download(url, None), tmp_path / "svhn" / "file.bin")
        for part in (url, "get file.bin by other means", f"put it in {tmp_path / 'svhn'}"):
            assert part in str(raised.value)


def tar_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def picture(value):
    buffer = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), value, np.uint8)).save(buffer, "png")
    return buffer.getvalue()


def source_of(*downloads, place="made"):
    return Source(
        "Made", "three pictures", place, lambda root, split: read_folder(root / place), ("test",), downloads
    )


def test_a_set_is_got_unpacked_and_not_got_twice(server, tmp_path, monkeypatch):
    archive = tar_of({f"made/{i}.png": picture(i) for i in range(3)})
    monkeypatch.setattr(datasets, "CATALOGUE", {"made": source_of(offer(server, archive, "made.tar.gz"))})
    runner, root = CliRunner(), ["--data", str(tmp_path)]
    assert "absent" in runner.invoke(app, ["data", "list", *root]).output
    result = runner.invoke(app, ["data", "get", "made", *root])
    assert result.exit_code == 0
    assert "checksum right" in result.output
    assert datasets.load("made", tmp_path).images[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.tar.gz"]
    assert "is there already" in runner.invoke(app, ["data", "get", "made", *root]).output
    assert len(server.asked) == 1
    (tmp_path / "made" / "1.png").unlink()
    assert "there already" in runner.invoke(app, ["data", "get", "made", "--again", *root]).output
    assert (tmp_path / "made" / "1.png").exists()
    assert len(server.asked) == 1
    assert "there " in runner.invoke(app, ["data", "list", *root]).output


def test_check_tells_right_from_wrong_from_absent(server, tmp_path, monkeypatch):
    archive = tar_of({"made/0.png": picture(0)})
    monkeypatch.setattr(datasets, "CATALOGUE", {"made": source_of(offer(server, archive, "made.tar.gz"))})
    runner, arguments = CliRunner(), ["data", "check", "--data", str(tmp_path)]
    assert "there are no sets" in runner.invoke(app, arguments).output
    assert "made: test: absent" in runner.invoke(app, [*arguments, "made"]).output
    runner.invoke(app, ["data", "get", "made", "--data", str(tmp_path)])
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0
    assert "made: made.tar.gz: checksum right" in result.output
    assert "made: test: 1 images" in result.output
    (tmp_path / "made.tar.gz").write_bytes(archive[:-1])
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert "made: made.tar.gz: WRONG" in result.output
    assert runner.invoke(app, [*arguments, "other"]).exit_code == 2


def test_an_archive_put_there_by_hand_is_checked_and_unpacked(server, tmp_path):
    archive = tar_of({"made/0.png": picture(7)})
    source = source_of(offer(server, archive, "made.tar.gz"))
    (tmp_path / "made.tar.gz").write_bytes(archive)
    mode = tmp_path.stat().st_mode
    download.get(source, tmp_path)
    assert (tmp_path / "made" / "0.png").read_bytes() == picture(7)
    assert tmp_path.stat().st_mode == mode
    assert server.asked == []


def test_a_zip_is_unpacked_too(server, tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("made/0.png", picture(1))
    download.get(
        source_of(offer(server, buffer.getvalue(), "made.zip", folder="inner"), place="inner/made"), tmp_path
    )
    assert (tmp_path / "inner" / "made" / "0.png").exists()


@pytest.mark.parametrize("name", ["../escaped.png", "/escaped-from-a-test-of-gramwatch.png"])
def test_nothing_is_unpacked_outside_its_folder(server, tmp_path, name):
    inside = tmp_path / "inside"
    source = source_of(offer(server, tar_of({"made/0.png": picture(0), name: b"x"}), "made.tar.gz"))
    if name.startswith("/"):  # unpacked as if it were not absolute
        download.get(source, inside)
        assert (inside / name.removeprefix("/")).read_bytes() == b"x"
    else:
        with pytest.raises(DataError, match="cannot be unpacked"):
            download.get(source, inside)
        assert not (inside / "made").exists()
    assert not (tmp_path / "escaped.png").exists()
    assert not Path(name).exists()


def test_a_damaged_archive_leaves_no_half_of_a_set(server, tmp_path):
    archive = tar_of({f"made/{i}.png": np.random.default_rng(i).bytes(50_000) for i in range(3)})
    with pytest.raises(DataError, match="cannot be unpacked"):
        download.get(source_of(offer(server, archive[:100_000], "made.tar.gz")), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["made.tar.gz"]


def test_what_a_killed_process_left_is_removed_and_a_set_appears_in_one_step(server, tmp_path, monkeypatch):
    source = source_of(
        offer(server, tar_of({"made/0.png": picture(0), "made/1.png": picture(1)}), "made.tar.gz")
    )
    left = tmp_path / ".unpacking-made.tar.gz-abc" / "made"
    left.mkdir(parents=True)
    (left / "0.png").write_bytes(b"half")
    moved, move = [], download._move

    def noted(entry: Path, place: Path) -> None:
        moved.append(len(list(entry.iterdir())))
        monkeypatch.setattr(download.shutil, "copytree", None)  # file by file, a kill would leave a half
        move(entry, place)

    monkeypatch.setattr(download, "_move", noted)
    download.get(source, tmp_path)
    assert moved == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.tar.gz"]
    assert (tmp_path / "made" / "0.png").read_bytes() == picture(0)


def test_sets_that_are_made_up_or_not_published(tmp_path):
    result = CliRunner().invoke(app, ["data", "get", "gaussian", "--data", str(tmp_path)])
    assert "nothing to download" in result.output
    with pytest.raises(DataError, match="CIFAR-100 subset cannot be downloaded"):
        download.get(CATALOGUE["cifar100_subset"], tmp_path)
    listed = CliRunner().invoke(app, ["data", "list", "--data", str(tmp_path)]).output
    assert len(listed.splitlines()) == 2 + len(CATALOGUE)
    assert all(name in listed for name in CATALOGUE)
    assert not re.search("[0-9a-f]{32}|http", listed)  # no checksums, no addresses
    sources = CliRunner().invoke(app, ["data", "list", "--sources", "--data", str(tmp_path)]).output
    assert "checksum unknown" in sources
    assert all(item.url in sources for source in CATALOGUE.values() for item in source.downloads)


def test_a_sha256_and_a_size_are_compared(server, tmp_path):
    right = hashlib.sha256(CONTENT).hexdigest()
    download.fetch(offer(server, md5=None, sha256=right, size=len(CONTENT)), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    with pytest.raises(DataError, match=rf"its SHA-256 is {right}, the published one is 11"):
        download.fetch(offer(server, sha256="1" * 64), tmp_path / "b.bin")  # its MD5 is right
    with pytest.raises(DataError, match=r"the server sends 5,120,000 bytes, the published file has 7"):
        download.fetch(offer(server, size=7), tmp_path / "b.bin")
    (tmp_path / "c.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(DataError, match=r"it has 5,119,999 bytes, the published one has 5,120,000"):
        download.check(tmp_path / "c.bin", offer(server, size=len(CONTENT)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "c.bin"]


def test_without_a_checksum_and_a_length_a_file_is_refused(server, tmp_path):
    server.tells_length, server.stop_after = False, 1000
    with pytest.raises(DataError, match="does not say how long it is, and no checksum is known"):
        download.fetch(offer(server, md5=None), tmp_path / "file.bin")
    with pytest.raises(DataError, match="its MD5 is"):
        download.fetch(offer(server), tmp_path / "file.bin")
    assert list(tmp_path.iterdir()) == []


def test_without_a_checksum_a_download_starts_anew(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"half of another file")
    download.fetch(offer(server, md5=None), tmp_path / "file.bin")
    assert server.asked == [None]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    server.stop_after = 1000
    with pytest.raises(DataError, match="1,000 of 5,120,000 bytes"):
        download.fetch(offer(server, md5=None), tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()


def test_a_set_without_a_checksum_is_looked_at_and_a_warning_says_so(server, tmp_path):
    bad = tar_of({"made/0.png": picture(0), "made/1.png": b"an error page, perhaps"})
    with (
        pytest.warns(GramwatchWarning, match=r"no checksum of made\.tar\.gz is known"),
        pytest.raises(DataError, match=r"cannot be unpacked: 1\.png is not a readable image"),
    ):
        download.get(source_of(offer(server, bad, "made.tar.gz", md5=None)), tmp_path / "bad")
    assert not (tmp_path / "bad" / "made").exists()
    empty = offer(server, tar_of({"made/page.html": b"<html>"}), "empty.tar.gz", md5=None)
    with (
        pytest.warns(GramwatchWarning, match="no checksum"),
        pytest.raises(DataError, match="cannot be unpacked: there is no image"),
    ):
        download.get(source_of(empty), tmp_path / "empty")
    good = offer(server, tar_of({"made/0.png": picture(0)}), "good.tar.gz", md5=None)
    with pytest.warns(GramwatchWarning, match="no checksum"):
        download.get(source_of(good), tmp_path / "good")
    assert (tmp_path / "good" / "made" / "0.png").exists()


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_an_archive_that_unpacks_to_far_too_much_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MOST_UNPACKED_OF_LITTLE", 2**20)
    path, members = tmp_path / f"bomb.{kind}", {f"made/{i}": bytes(2**20) for i in range(3)}
    path.write_bytes(tar_of(members) if kind == "tar.gz" else zip_of(members))
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match=r"bomb.*cannot be unpacked: it unpacks to more than 1,048,576 bytes"):
        download.unpack(path, tmp_path)
    monkeypatch.setattr(download, "MOST_UNPACKED_OF_LITTLE", 2**30)
    monkeypatch.setattr(download, "MOST_MEMBERS", 2)
    with pytest.raises(DataError, match="it has more than 2 members"):
        download.unpack(path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


def zip_of(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return buffer.getvalue()


def test_damaged_archives_of_every_kind_are_named(tmp_path):
    rng = np.random.default_rng(0)
    members = {f"made/{i}.png": picture(rng.integers(0, 256, (32, 32, 3))) for i in range(3)}
    for kind, content in (("tar.gz", tar_of(members)), ("zip", zip_of(members)), ("tar", b"nothing")):
        for _ in range(40):
            damaged = bytearray(content)
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
            path = tmp_path / f"set.{kind}"
            path.write_bytes(damaged[: rng.integers(1, len(damaged) // 2)])
            with pytest.raises(DataError, match="cannot be unpacked") as raised:
                download.unpack(path, tmp_path, look=True)
            assert str(path) in str(raised.value)
            path.unlink()
        assert list(tmp_path.iterdir()) == []


def test_a_redirect_from_https_to_http_is_refused():
    follow = download._SameOrSafer()
    secure, plain = (urllib.request.Request(f"{kind}://127.0.0.1/set.zip") for kind in ("https", "http"))
    for request, target in (
        (secure, "https://localhost/a"),
        (plain, "http://localhost/a"),
        (plain, "https://a/b"),
    ):
        assert follow.redirect_request(request, None, 302, "", {}, target).full_url == target
    for target in ("http://127.0.0.1/set.zip", "ftp://127.0.0.1/set.zip"):
        with pytest.raises(OSError, match="which is not encrypted"):
            follow.redirect_request(secure, None, 302, "", {}, target)


def test_redirects_are_followed_by_that_handler(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download._SameOrSafer, "redirect_request", lambda *_: pytest.fail("asked"))
    server.files["/moved"] = None
    monkeypatch.setattr(Handler, "do_GET", _redirect)
    with pytest.raises(pytest.fail.Exception, match="asked"):
        download.fetch(Download(f"{server.url}/file.bin", None), tmp_path / "file.bin")


def _redirect(self):
    self.send_response(302)
    self.send_header("Location", f"{self.server.url}/moved")
    self.end_headers()
