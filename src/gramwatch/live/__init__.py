"""A page on this machine where a person gives an image and sees verdict, map and sentences: `gramwatch live`.

FastAPI answers, as in `serve`. The page is plain HTML, CSS and JavaScript. It asks no other machine for
anything, and no image is kept.
"""

from gramwatch.live.app import create_page, run_page
from gramwatch.live.examiner import Examiner
from gramwatch.live.shown import Example, Shown

__all__ = ["Examiner", "Example", "Shown", "create_page", "run_page"]
