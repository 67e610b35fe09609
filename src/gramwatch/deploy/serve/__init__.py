"""A guard as an HTTP service: `gramwatch serve`, or `create_app` under a server of your own.

FastAPI answers, async-batcher joins the images of several requests into batches. What is here is what they
lack: limits, admission, verdicts, metrics, and an orderly end.
"""

from gramwatch.errors import MissingExtraError

try:
    from gramwatch.deploy.serve.app import create_app
    from gramwatch.deploy.serve.judge import Judge
    from gramwatch.deploy.serve.server import check_reach, server_of
    from gramwatch.deploy.serve.service import Limits
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "gramwatch":
        raise
    raise MissingExtraError(
        f"the service needs the package {error.name}: install it with pip install 'gramwatch[serve]'"
    ) from None

__all__ = ["Judge", "Limits", "check_reach", "create_app", "server_of"]
