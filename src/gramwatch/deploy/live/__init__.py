"""A page on this machine where a person gives an image and sees verdict, map and sentences: `gramwatch live`.

FastAPI answers, as in `serve`. The page is plain HTML, CSS and JavaScript. It asks no other machine for
anything, and no image is kept.
"""

from gramwatch.errors import MissingExtraError

try:
    from gramwatch.deploy.live.app import create_page, opened_port, run_page
    from gramwatch.deploy.live.examiner import Examiner
    from gramwatch.deploy.live.shown import Example, Shown
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "gramwatch":
        raise
    raise MissingExtraError(
        f"the page needs the package {error.name}: install it with pip install 'gramwatch[serve]'"
    ) from None

__all__ = ["Examiner", "Example", "Shown", "create_page", "opened_port", "run_page"]
