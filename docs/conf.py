"""The site: `make docs` builds it from the Markdown pages of the repository, strictly.

The pages are plain Markdown, so that a code host shows them, too. What only a site needs is here: the
contents (`CONTENTS`), and pages for the source files that the Markdown pages link to (`Sources`).
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab")]

from gramwatch import __version__  # noqa: E402

project = "gramwatch"
author = "The gramwatch developers"
copyright = "the gramwatch developers. Apache-2.0"  # noqa: A001
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "docs/README"
include_patterns = ["docs/**", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = ["docs/conf.py", "docs/_static"]
source_suffix = {".md": "markdown"}
nitpicky = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
myst_links_external_new_tab = False

default_role = "code"  # docstrings write `names` as Markdown does
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
viewcode_line_numbers = True
add_module_names = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"gramwatch {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
pygments_dark_style = "a11y-high-contrast-dark"

METHODS = sorted(path.stem for path in (ROOT / "docs" / "methods").glob("*.md") if path.stem != "README")
RESULTS = sorted(path.stem for path in (ROOT / "docs" / "results").glob("*.md") if path.stem != "README")
HOW_TO = [
    "timm",
    "torchvision",
    "hugging_face",
    "text",
    "lightning",
    "own_network",
    "share",
    "serve",
    "export",
    "report",
    "live",
    "level",
    "calibration",
    "large_data",
    "gpus",
]
CONTENTS: dict[str, list[tuple[str, list[str]]]] = {
    "docs/README": [
        ("Begin", ["start", "tutorial", "concepts", "howto/README", "cli", "faq"]),
        ("Use", ["guard", "explain", "inputs", "taps", "monitor", "scale", "limits", "reliability", "files"]),
        ("Methods", ["method", "methods/README", "training"]),
        ("Evidence", ["results/README", "guard-study", "experiments", "performance"]),
        ("Data and networks", ["datasets", "checkpoints"]),
        ("Reference", ["api", "architecture", "/CONTRIBUTING", "pages", "/CHANGELOG"]),
    ],
    "docs/howto/README": [("", HOW_TO)],
    "docs/methods/README": [("", METHODS)],
    "docs/results/README": [("", RESULTS)],
}
"""The pages below a page, in groups. A page that is in no group is an error."""


def whole_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Begin with a title. The pages that experiments write begin with `##`."""
    if source[0].startswith("## "):
        source[0] = re.sub("^##", "#", source[0], flags=re.MULTILINE)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the contents to the text of a page."""
    for caption, pages in CONTENTS.get(page, []):
        lines = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *pages]
        source[0] += "\n\n" + "\n".join([*lines, "```"]) + "\n"


class Sources(SphinxTransform):
    """Links to source files become links to pages that show them."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        """Replace the links of one page."""
        here = f"{self.env.docname}.html"
        for node in list(self.document.findall(addnodes.download_reference)):
            _, absolute = self.env.relfn2path(node["reftarget"], self.env.docname)
            path = Path(absolute).relative_to(ROOT)
            if path.suffix in (".py", ".txt") and (ROOT / path).is_file():
                self.env.gramwatch_sources = getattr(self.env, "gramwatch_sources", set()) | {str(path)}
                place = relative_uri(here, f"source/{path}.html")
                link = nodes.reference("", "", *node.children, refuri=place, internal=True)
                node.replace_self(link)


def source_pages(app: Sphinx) -> Any:
    """The pages of the source files."""
    for name in sorted(getattr(app.env, "gramwatch_sources", set())):
        text = (ROOT / name).read_text(encoding="utf-8")
        language = "python" if name.endswith(".py") else "text"
        code = app.builder.highlighter.highlight_block(text, language, linenos="inline")
        yield f"source/{name}", {"title": name, "body": f"<h1>{name}</h1>{code}"}, "page.html"


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.connect("source-read", whole_page)
    app.connect("source-read", add_contents)
    app.connect("html-collect-pages", source_pages)
    app.add_transform(Sources)
