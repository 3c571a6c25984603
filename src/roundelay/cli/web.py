"""`roundelay web`: the local page over everything, in a browser."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import click

from roundelay.cli._types import json_option
from roundelay.errors import MissingPackageError

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  roundelay web                          open the page
  roundelay web --port 8700 --no-open    print its address
  roundelay web --host 10.0.0.7          for others, who need the token
  roundelay web --runs traces            with the timelines of recorded runs
"""


@click.command("web", epilog=EXAMPLES)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at, if not this host's own.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port; by default a free one."
)
@click.option("--open/--no-open", "open_it", default=True, help="Open it in a browser, or not.")
@click.option(
    "--token",
    default="",
    envvar="ROUNDELAY_WEB_TOKEN",
    metavar="TOKEN",
    help="Token that the page asks for; by default a random one. Others on this host can read a "
    "command line, but not ROUNDELAY_WEB_TOKEN.",
)
@click.option(
    "--runs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with recorded runs: of one (`roundelay run --trace DIR`), or with a folder each.",
)
@json_option
def command(
    *, host: str, port: int, open_it: bool, token: str, runs: Path | None, as_json: bool
) -> None:
    """Open the local page: collectives step by step, training, plans, timelines.

    It listens on this host alone, until Ctrl-C. The printed address has the token in it: whoever
    has the address can look.
    """
    try:
        from roundelay.web.serve import page_server  # noqa: PLC0415 - optional packages
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise MissingPackageError("roundelay web", error.name, "web") from None
    server = page_server(host, port, token, runs=runs)

    def ready() -> None:
        if as_json:
            click.echo(json.dumps({"address": server.address, "link": server.link}))
        else:
            click.echo(f"{server.link}")
            click.echo("Ctrl-C ends it.", err=True)
        if open_it:
            webbrowser.open(server.link)

    server.serve(ready)
