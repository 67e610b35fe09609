"""The package as strangers install it: wheel, sdist, oldest and newest dependencies, known holes."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests.stress_common import Row, Skipped

ROOT = Path(__file__).parents[1]
EXTRAS = ("cli", "export", "plot", "serve")
TESTS = (
    "guard/test_guard.py",
    "methods/test_gram.py",
    "files/test_artifact.py",
    "stream/test_monitor.py",
    "deploy/serve",
    "cli/test_serve.py",
    "deploy/test_exported.py",
)
"""What is run with the oldest and the newest dependencies."""
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield installed(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        yield tested(Path(folder), "oldest", lowest())
    with tempfile.TemporaryDirectory() as folder:
        yield tested(Path(folder), "newest", [name_of(pin) for pin in lowest()])
    yield audited()


def ran(*words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def environment(folder: Path) -> Path:
    """An environment with nothing but pip. Returns its Python."""
    ran(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def installed(folder: Path) -> Row:
    """Build a wheel and an sdist, install each in an empty environment, and run the demo there."""
    ran(sys.executable, *PIP, "wheel", "--no-deps", "-w", folder, ROOT)
    builder = environment(folder / "builder")
    ran(builder, *PIP, "install", "build")
    ran(builder, "-m", "build", "--sdist", "-o", folder, ROOT)
    packages = [*folder.glob("gramwatch-*.whl"), *folder.glob("gramwatch-*.tar.gz")]
    assert len(packages) == 2, packages
    survived = 0
    for package in packages:
        python = environment(folder / package.suffix[1:])
        ran(python, *PIP, "install", "-c", ROOT / "constraints.txt", f"{package}[cli,plot]")
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        said = ran(python, "-m", "gramwatch", "demo", cwd=folder, env=outside)
        survived += "Guard" in said and (folder / "gramwatch-demo" / "demo.png").is_file()
    return Row("wheel and sdist in an empty environment, with the demo", 2, survived, "the demo runs in both")


# --- oldest and newest dependencies -----------------------------------------------------------------


def lowest() -> list[str]:
    """The lowest versions that the package allows."""
    if sys.version_info < (3, 11):
        raise Skipped("the list of dependencies is read by Python 3.11 and later")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pins = {}
    for requirement in [
        *project["dependencies"],
        *(requirement for extra in EXTRAS for requirement in extras[extra]),
    ]:
        match = re.match(r"([\w-]+)>=([\d.]+)", requirement)
        if match and "python_version < " not in requirement:
            name, number = match.groups()
            pins[name] = f"{name}=={number}.*" if number.count(".") < 2 else f"{name}=={number}"
    return sorted(pins.values())


def name_of(pin: str) -> str:
    return pin.partition("=")[0]


def tested(folder: Path, which: str, pins: list[str]) -> Row:
    """Run the tests of the core, the service and the exported guard with these versions of dependencies."""
    python = environment(folder / which)
    ran(python, *PIP, "install", *pins, "pytest", "hypothesis")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in TESTS)],
        cwd=ROOT, env=env, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)
    names = sorted(map(name_of, pins))
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    versions = [number.partition("+")[0] for number in ran(python, "-c", ask, *names).split()]
    versions_tested = ", ".join(f"{name} {number}" for name, number in zip(names, versions, strict=True))
    return counted(f"tests with the {which} dependencies", done.stdout, versions_tested)


def counted(what: str, said: str, facts: str) -> Row:
    """A row from the last line of pytest."""
    numbers = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", said)}
    passed = numbers.get("passed", 0)
    return Row(what, sum(numbers.values()), passed, facts)


# --- known holes -------------------------------------------------------------------------------------


def audited() -> Row:
    """Known vulnerabilities of the direct dependencies, as they are installed here."""
    names = sorted(map(name_of, lowest()))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(f"{name}=={version(name).partition('+')[0]}" for name in names))
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "-f", "json", "-r", file.name],
            capture_output=True, text=True,
        )  # fmt: skip
    return holes(done.stdout, done.stderr)


def holes(said: str, errors: str = "") -> Row:
    """A row from the answer of pip-audit. A package of which it knows nothing was not looked at."""
    try:
        packages = json.loads(said)["dependencies"]
    except (json.JSONDecodeError, KeyError):
        last = (errors.strip().splitlines() or ["no answer"])[-1]
        raise Skipped(f"pip-audit, because it reaches no advisories ({last:.120})") from None
    known = [package for package in packages if "vulns" in package]
    if not known:
        raise Skipped(
            f"pip-audit of {len(packages)} direct dependencies, because it reaches no advisories here"
        )
    for package in known:
        for hole in package["vulns"]:
            print(f"{package['name']} {package['version']}: {hole['id']}", file=sys.stderr)
    unknown = [package["name"] for package in packages if "vulns" not in package]
    return Row(
        "direct dependencies without known holes",
        len(known),
        sum(not package["vulns"] for package in known),
        "pip-audit" + (f", which does not know {', '.join(unknown)}" if unknown else ""),
    )
