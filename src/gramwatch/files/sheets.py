"""Text in the cells of CSV tables. A spreadsheet takes a cell such as `=cmd` for a formula and runs it.

`as_cell` puts an apostrophe before such a text, `of_cell` takes it away again. No other text is changed.
"""

import re

_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""How a formula begins, also in full-width letters. Apostrophes before it are the text's own."""


def as_cell(text: str) -> str:
    """A text for a cell, which no spreadsheet takes for a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def of_cell(cell: str) -> str:
    """The text of a cell that `as_cell` made."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
