"""The command `gramwatch live`."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests.cli.invoking import invoke, raising, told

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")


def test_the_page_answers_as_explain_does_and_ctrl_c_ends_it(own):
    image = next(own.test.rglob("*.png"))
    words = ["live", own.guard, "--model", own.model, "--port", 0, "--device", "cpu", "--images", own.test]
    running = subprocess.Popen(
        [sys.executable, "-m", "gramwatch", *map(str, words)],
        cwd=own.folder, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert running.stderr is not None
        said = next(line for line in running.stderr if "http" in line)
        address = re.fullmatch(r"open (http://127\.0\.0\.1:\d+) in a browser\. Ctrl-C ends it\n", said)[1]
        with urllib.request.urlopen(f"{address}/judge", image.read_bytes()) as answer:
            report = json.load(answer)
        with urllib.request.urlopen(f"{address}/about") as answer:
            about = json.load(answer)
        with urllib.request.urlopen(f"{address}/examples/0") as answer:
            assert (answer.headers["content-type"], answer.read()) == ("image/png", image_bytes(own.test))
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0
        assert "Traceback" not in running.stderr.read()
    finally:
        running.kill()
        running.wait()
    explanation = invoke("explain", own.guard, image, "--model", own.model, "--device", "cpu", "--json")
    expected = json.loads(explanation.stdout)
    assert report["sentences"] == expected["sentences"][1:]
    assert report["score"] == pytest.approx(expected["score"])
    assert report["is_ood"] is expected["is_ood"]
    assert (about["title"], about["fill"]) == (own.guard.stem, False)
    assert about["about"].startswith("The network knows bright, dark. The guard flags")
    assert dict(about["facts"])["network"] == own.model
    names = about["examples"]
    assert (len(names), names[-3:]) == (15, ["plain grey", "coloured noise", "stripes"])
    assert {name.partition(":")[0] for name in names[:-3]} == {"bright", "dark"}
    assert dict(about["facts"])["level"] == "0.95"


def image_bytes(folder) -> bytes:
    return min(folder.rglob("*.png")).read_bytes()


def test_the_demo_has_a_page_of_its_own(monkeypatch):
    pages = []

    class Examined:
        def warm_up(self):
            pages.append("warm")

    monkeypatch.setattr("gramwatch.deploy.live.demo.demo_page", lambda say, progress: (Examined(), "shown"))
    monkeypatch.setattr("gramwatch.deploy.live.create_page", lambda examiner, shown: pages.append(shown))
    monkeypatch.setattr(
        "gramwatch.deploy.live.run_page", lambda app, opened, started: pages.append(opened.getsockname()[0])
    )
    result = invoke("live", "--demo", "--port", 0)
    assert result.exit_code == 0, result.output
    assert pages == ["warm", "shown", "127.0.0.1"]


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ([], 2, "give the file of a guard, or --demo"),
        (["--demo", "--images", "."], 2, "the demo has images of its own"),
        (["guard", "--images", "nowhere"], 2, "nowhere"),
        (["guard", "--demo"], 2, "give the file of a guard, or --demo"),
        (["missing.safetensors"], 2, "there is no file missing.safetensors"),
        (["guard", "--port", "1"], 2, "port 1 cannot be used"),
        (["guard", "--mean", "x"], 2, "is not a list of numbers"),
        (["guard"], 1, "--model"),
    ],
)
def test_wrong_usage_is_one_line(own, words, code, reason, monkeypatch):
    monkeypatch.setattr("gramwatch.deploy.live.run_page", raising(AssertionError("it serves")))
    if "1" in words:  # the superuser may take any port
        monkeypatch.setattr("socket.socket.bind", raising(PermissionError(13, "Permission denied")))
    free = [] if "--port" in words else ["--port", 0]
    result = invoke("live", *[own.guard if word == "guard" else word for word in words], *free)
    assert result.exit_code == code, result.output
    assert reason in told(result)


def test_interrupted_while_it_trains_it_says_so(monkeypatch):
    monkeypatch.setattr("gramwatch.deploy.live.demo.demo_page", raising(KeyboardInterrupt()))
    result = invoke("live", "--demo", "--port", 0)
    assert result.exit_code == 130
    assert "interrupted" in result.output


def test_without_the_extra_the_command_says_what_to_install():
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "import gramwatch\n"
        "try: import gramwatch.deploy.live\n"
        "except gramwatch.MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gramwatch[serve]" in done.stdout
