"""The package as a stranger meets it: its imports, its README, its command, its habits."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gramwatch
from tests import on_gpu

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "gramwatch").rglob("*.py"))


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_importing_needs_only_torch_numpy_and_safetensors():
    result = run(
        "import sys, torch, numpy, safetensors\n"
        "before = set(sys.modules)\n"
        "import gramwatch\n"
        "extras = 'sklearn scipy tqdm typer rich matplotlib PIL torchvision timm numba lightning'\n"
        "print(sorted(set(extras.split()) & (set(sys.modules) - before)))"
    )
    assert result.strip() == "[]"


def test_every_public_name_exists():
    assert sorted(gramwatch.__all__) == list(gramwatch.__all__)
    for name in gramwatch.__all__:
        assert getattr(gramwatch, name) is not None


def test_names_are_imported_at_their_first_use():
    result = run(
        "import sys, gramwatch\n"
        "print('torch' in sys.modules)\n"
        "print(set(gramwatch._WHERE) | {'__version__', 'statistics'} == set(gramwatch.__all__))\n"
        "print(set(gramwatch.__all__) <= set(dir(gramwatch)))\n"
        "import gramwatch.evaluation.evaluate\n"
        "from gramwatch.evaluation.evaluate import Evaluation\n"
        "print(gramwatch.evaluate.__name__, gramwatch.Evaluation is Evaluation)\n"
        "print(gramwatch.methods.__name__, hasattr(gramwatch, 'magic'))"
    )
    assert result.split() == ["False", "True", "True", "evaluate", "True", "gramwatch.methods", "False"]


def test_nothing_executes_what_a_file_says():
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        assert not re.search(r"import pickle\b|(?<!\.)\beval\(|\bexec\(|joblib", text), source
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, source


def test_the_source_never_uses_pickle() -> None:
    sources = sorted(Path(gramwatch.__file__).parent.rglob("*.py"))
    assert len(sources) > 10
    forbidden = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "allow_pickle"}
    findings = []
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            names: set[str] = set()
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {part for alias in node.names for part in alias.name.split(".")}
                names |= set((getattr(node, "module", None) or "").split("."))
                if getattr(node, "module", None) == "torch" and names & {"load", "save", "hub"}:
                    findings.append((source.name, node.lineno, "torch.load"))
            elif isinstance(node, ast.Attribute):
                names = {node.attr}
                if isinstance(node.value, ast.Name) and node.value.id == "torch":
                    names |= {f"torch.{node.attr}"} & {"torch.load", "torch.save", "torch.hub"}
            elif isinstance(node, ast.Name):
                names = {node.id}
            elif isinstance(node, ast.keyword):
                names = {node.arg or ""}
            unwanted = names & (forbidden | {"torch.load", "torch.save", "torch.hub"})
            findings += [(source.name, getattr(node, "lineno", 0), name) for name in sorted(unwanted)]
    # Other people's checkpoints, by PyTorch's reader of parameters alone: the test above looks at how.
    allowed = {("networks.py", "torch.load")}
    assert [finding for finding in findings if (finding[0], finding[2]) not in allowed] == []


def test_the_version_is_in_the_changelog():
    assert f"[{gramwatch.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_documents_link_only_to_files_that_exist():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) >= 4
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_without_the_extra_the_command_says_what_to_install():
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "from gramwatch.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: print(stop.code)"
    )
    assert "gramwatch[cli" in run(code)


def test_without_matplotlib_pictures_say_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import gramwatch.explain.frame\n"
        "try: gramwatch.explain.frame.pyplot()\n"
        "except gramwatch.MissingExtraError as error: print(error)"
    )
    assert "gramwatch[plot]" in run(code)


def test_every_package_that_is_imported_is_declared():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    declared = [*project["dependencies"], *(finding for extra in extras for finding in extra)]
    names = {re.match(r"[\w-]+", finding).group().lower() for finding in declared}
    modules = {"PIL": "pillow", "sklearn": "scikit-learn", "vl_convert": "vl-convert-python"} | {
        name.replace("-", "_"): name for name in ("async-batcher", "prometheus-client")
    }
    # Used where they happen to be installed: triton comes with PyTorch, faiss makes a search quicker.
    optional = {"triton", "faiss"}
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            result = []
            if isinstance(node, ast.Import):
                result = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                result = [node.module]
            for name in {module.partition(".")[0] for module in result} - optional:
                known = name == "gramwatch" or name in sys.stdlib_module_names
                assert known or modules.get(name, name) in names, f"{source}: {name}"


def test_no_release_with_a_known_hole_that_matters_here_is_allowed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    # torch.load(weights_only=True): CVE-2025-32434 until 2.6, CVE-2026-24747 until 2.10.
    # Pillow: CVE-2025-48379 until 11.3, CVE-2026-25990 until 12.1.1, CVE-2026-96639 until 13.0.
    # tqdm: CVE-2024-34062 until 4.66.3. lightning: GHSA-w37p-236h-pfx3, 2.6.2 and 2.6.3 steal credentials.
    allowed = ('"torch>=2.10"', '"pillow>=13.0; python_version >=', '"tqdm>=4.66.3"', "!=2.6.2,!=2.6.3")
    for least in allowed:
        assert least in text


# --- tests that need a GPU ---------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_tests_of_a_gpu_do_not_pass_without_one():
    with pytest.raises(SystemExit, match="there is no CUDA device"):
        on_gpu.main([])
