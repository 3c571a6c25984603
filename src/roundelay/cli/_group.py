"""The command `roundelay` itself: finds its commands by listing the folder, and ends well."""

from __future__ import annotations

import difflib
from typing import Any

import click

from roundelay.cli._standard_output import output_kept
from roundelay.errors import InvalidArgumentError, NoEngineError, RoundelayError
from roundelay.registry import Family
from roundelay.view.terminal_text import safe

#: Every file's command is called `command`: a file called list.py should not hide the built-in.
COMMANDS: Family[click.Command] = Family("roundelay.cli", public=lambda _: "command")

EXIT_FAILED, EXIT_WRONG_USE, EXIT_INTERRUPTED = 1, 2, 130

EXAMPLES = """\b
Examples:
  roundelay web                                      all of it, in a browser
  roundelay list                                     all algorithms with their costs
  roundelay explain all_reduce -n 5                  step through a ring all-reduce
  roundelay explain all_reduce --out ring.html       a page to step through
  roundelay prove                                    prove every algorithm
  roundelay demo                                     four ranks on this host, checked
  roundelay run -n 4 train.py                        your script on four ranks
  roundelay kube trainjob --help                     the manifest of a job for Kubernetes
  roundelay verify train.py:job --strategy zero2     does it train as one device does?
  roundelay export runs/step-300 model.safetensors   weights in one file, for others
  roundelay bench all_reduce -n 2 --against gloo     how fast, beside others
  roundelay plan --params 7.5e9 --gpus 64            what fits, and how fast
  roundelay doctor                                   what this host can do
"""


class Commands(click.Group):
    """Loads a command when it is asked for, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the files."""
        del ctx
        return COMMANDS.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load the file of a command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        try:
            return COMMANDS.load(cmd_name)
        except NoEngineError as error:
            return _without_engine(cmd_name, error)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one is nearest."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"there is no command '{safe(name)}'.{hint} Known: {', '.join(known)}.")
        return super().resolve_command(ctx, args)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # what click hands over
    ) -> click.Context:
        """Read the words; help and version are written here."""
        with output_kept():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:  # whatever a command returns
        """Run the command; wrong use exits with 2, failed work with 1, Ctrl-C with 130."""
        try:
            with output_kept():
                return super().invoke(ctx)
        except RoundelayError as error:
            wrong_use = isinstance(error, InvalidArgumentError)
            for number, line in enumerate(str(error).splitlines()):
                click.echo(("" if number else "Error: ") + safe(line), err=True)
            ctx.exit(EXIT_WRONG_USE if wrong_use else EXIT_FAILED)
        except (KeyboardInterrupt, click.Abort):
            click.echo(err=True)
            ctx.exit(EXIT_INTERRUPTED)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001 - click
    if not wanted or ctx.resilient_parsing:
        return
    from roundelay import __version__  # noqa: PLC0415 - only here is it needed

    try:
        from roundelay import _core  # noqa: PLC0415 - likewise
    except NoEngineError:
        built = "no native core"
    else:
        built = f"native core: {_core.compiler()}, {' '.join(_core.instruction_sets())}"
    click.echo(f"roundelay {__version__} ({built})")
    ctx.exit()


def _without_engine(name: str, error: NoEngineError) -> click.Command:
    """Stand in for a command that starts ranks, where none can be: it says so when it is used."""

    def refuse(words: object) -> None:
        del words
        raise error

    return click.Command(
        name,
        help=f"Not here. {error}",
        short_help="Not here: it needs the native core.",
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        callback=refuse,
    )


@click.group(
    cls=Commands,
    epilog=EXAMPLES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_version,
    help="Show the version, and how the native core was built.",
)
@click.pass_context
def roundelay(ctx: click.Context) -> None:
    """Look at collective algorithms, run ranks on them, and check and measure both.

    To look: web, list, explain, prove. To run: demo, run, kube, doctor. To check and measure:
    verify, bench. To plan: plan. To hand on: export.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
