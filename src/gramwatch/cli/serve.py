"""`gramwatch serve`: a guard as an HTTP service."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import about, chosen_device, existing, writable_file
from gramwatch.cli.common import opened_guard, prepared_otherwise
from gramwatch.cli.options import Device, NetworkOptions, PreprocessingOptions, Quiet, Voice

if TYPE_CHECKING:
    from gramwatch.deploy.serve import Judge
    from gramwatch.detect.measurement import Calibrated
    from gramwatch.stream.monitor import Monitor


def serve(
    guard: Annotated[
        Path,
        typer.Argument(
            metavar="GUARD",
            help="A file that 'gramwatch fit' wrote, or an .onnx file of 'gramwatch export'.",
            show_default=False,
            callback=existing("GUARD"),
        ),
    ],
    *,
    network: NetworkOptions,
    given: PreprocessingOptions,
    device: Device = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port. 0: any that is free.")] = 8000,
    name: Annotated[str, typer.Option(help="The name of the model in /v2/models/NAME.")] = "guard",
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the token that clients must send. Or set GRAMWATCH_TOKEN.",
            callback=existing("--token-file"),
        ),
    ] = None,
    allow_anyone: Annotated[
        bool, typer.Option("--allow-anyone", help="Listen beyond this machine without a token.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=2, help="The most images in one pass.")] = 32,
    batch_ms: Annotated[
        float, typer.Option(min=0.1, help="Milliseconds that an image waits for others to join its batch.")
    ] = 5.0,
    queue: Annotated[
        int, typer.Option(min=1, help="The most images that wait. Beyond it the answer is 429.")
    ] = 128,
    max_images: Annotated[int, typer.Option(min=1, help="The most images of a request.")] = 32,
    max_megabytes: Annotated[float, typer.Option(min=0.001, help="The largest request, in MiB.")] = 16.0,
    max_pixels: Annotated[int, typer.Option(min=1, help="The most pixels of an image.")] = 50_000_000,
    max_request_pixels: Annotated[
        int | None,
        typer.Option(
            min=1, help="The most pixels of all images of a request. By default twice --max-pixels."
        ),
    ] = None,
    read_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long a client may take to send its headers, and its body.")
    ] = 10.0,
    judge_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long a request may take to be decoded and judged.")
    ] = 30.0,
    mean_time_to_false_alarm: Annotated[
        float,
        typer.Option(
            min=0.0, help="The mean time to a false alarm of the monitor, in images. 0: no monitor."
        ),
    ] = 1_000_000,
    monitor_reference: Annotated[
        str, typer.Option(help="What the monitor compares scores with: online or fixed (docs/monitor.md).")
    ] = "online",
    monitor_every: Annotated[
        int, typer.Option(min=1, help="The monitor uses every n-th image, for frames of a video.")
    ] = 1,
    monitor_replica: Annotated[
        str, typer.Option(help="Which copy of the service this is, and of how many, for the monitor: 0/4")
    ] = "0/1",
    monitor_state: Annotated[
        Path | None,
        typer.Option(help="A file that keeps the state of the monitor. It is saved every minute."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Serve a guard by HTTP: images in, verdicts out.

    POST /score takes an image file, or a form with files. /score?reasons=true says why an image is flagged.
    /v2/models/NAME/infer is the Open Inference Protocol. GET / names the other routes.
    SIGTERM and Ctrl-C end the service after it has finished what it accepted.

    Examples:
    gramwatch serve guard.safetensors --model timm:resnet18 --weights net.safetensors

    gramwatch serve guard.onnx

    curl --data-binary @photo.jpg http://127.0.0.1:8000/score

    """
    from gramwatch.deploy.export import SUFFIXES
    from gramwatch.deploy.serve import Limits, check_reach, create_app, server_of

    voice = Voice(quiet)
    token = _token(token_file)
    with about("--host"):
        check_reach(host, token, allow_anyone)
    with about("--batch-size, --queue, --max-..."):
        limits = Limits(
            body_bytes=int(max_megabytes * 2**20),
            pixels=max_pixels,
            request_pixels=max_request_pixels,
            images=max_images,
            queue=queue,
            batch_size=batch_size,
            batch_seconds=batch_ms / 1000,
            read_seconds=read_seconds,
            judge_seconds=judge_seconds,
        )
    replica = _replica(monitor_replica)
    if monitor_state is not None:
        writable_file(monitor_state, "--monitor-state", reads=(guard, network.weights, token_file))
    opening = _exported if guard.suffix in SUFFIXES else _fitted
    detector, judge = opening(guard, network, device, given, voice)
    if mean_time_to_false_alarm:
        wanted = {
            "mean_time_to_false_alarm": mean_time_to_false_alarm,
            "reference": monitor_reference,
            "every": monitor_every,
            "replica": replica,
        }
        judge.monitor = _monitor(detector, wanted, monitor_state, voice)
        judge.state = monitor_state
    app = create_app(judge, limits=limits, token=token, name=name, hosts=["*"] if allow_anyone else [])
    server_of(
        app, host, port, read_seconds=read_seconds, started=lambda url: voice.say(f"listening at {url}")
    ).run()
    voice.say("ended. All that was accepted is answered")


def _token(file: Path | None) -> str | None:
    """The token, from a file or from the environment. On the command line everyone could see it."""
    if file is None:
        return os.environ.get("GRAMWATCH_TOKEN")
    return file.read_text(encoding="utf-8").strip()


def _fitted(
    guard: Path, network: NetworkOptions, device: str | None, given: PreprocessingOptions, voice: Voice
) -> "tuple[Calibrated, Judge]":
    """A guard with its network."""
    from gramwatch.deploy.serve import Judge

    opened = opened_guard(guard, network, chosen_device(device), given)
    voice.note(*opened.differences())
    classes = opened.classes or opened.model.classes
    return opened.detector, Judge(opened.detector, opened.preprocessing, classes)


def _exported(
    guard: Path, network: NetworkOptions, device: str | None, given: PreprocessingOptions, voice: Voice
) -> "tuple[Calibrated, Judge]":
    """A guard with its network in one graph."""
    from gramwatch.deploy.exported import ExportedGuard
    from gramwatch.deploy.serve import Judge

    if network != NetworkOptions():
        raise typer.BadParameter(
            f"{guard} has its network inside: leave it out", param_hint="--model, --weights"
        )
    exported = ExportedGuard(guard, device)
    if exported.takes_pixels and (given.mean or given.std):
        raise typer.BadParameter(f"{guard} normalises by itself: leave them out", param_hint="--mean, --std")
    preprocessing = given.applied(exported.preprocessing, str(guard))
    exported.check(preprocessing)
    voice.note(*prepared_otherwise(preprocessing, exported.preprocessing or preprocessing))
    judge = Judge(exported, preprocessing, exported.classes, takes_pixels=exported.takes_pixels)
    return exported, judge


def _replica(text: str) -> tuple[int, int]:
    """The number of this copy, and the number of copies."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise typer.BadParameter(
            f"'{text}' does not name a copy: write 0/4 for the first of four, and 3/4 for the last",
            param_hint="--monitor-replica",
        )
    return int(number), int(count)


def _monitor(detector: "Calibrated", wanted: dict[str, Any], state: Path | None, voice: Voice) -> "Monitor":
    """A new monitor, or the one that was saved."""
    from gramwatch.stream.monitor import Monitor

    if state is None or not state.exists():
        with about("--mean-time-to-false-alarm, --monitor-..."):
            return Monitor(detector, **wanted)
    monitor = Monitor.load(state, detector)
    for name, value in wanted.items():
        if getattr(monitor, name) != value:
            voice.note(f"{state} was begun with {name}={getattr(monitor, name)}, which stays")
    voice.say(f"going on: the monitor has seen {monitor.seen:,} images")
    return monitor
