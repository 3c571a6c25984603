"""The command `roundelay` itself: finds its commands by listing the folder, and ends well."""

from __future__ import annotations

import difflib
from typing import Any

import click

from roundelay.errors import InvalidArgumentError, RoundelayError
from roundelay.registry import Family
from roundelay.view.terminal_text import safe

__all__ = ["roundelay"]

#: Every file's command is called `command`: a file called list.py should not hide the built-in.
COMMANDS: Family[click.Command] = Family("roundelay.cli", public=lambda _: "command")

EXIT_FAILED, EXIT_WRONG_USE, EXIT_INTERRUPTED = 1, 2, 130

EXAMPLES = """\b
Examples:
  roundelay list                                     all algorithms with their costs
  roundelay explain all_reduce -n 5                  step through a ring all-reduce
  roundelay explain all_reduce --values "1,1 2,2 3,3 4,4"
  roundelay explain all_reduce --diff ring,tree      two side by side
  roundelay explain all_reduce --out ring.html       a page to step through
  roundelay prove                                    prove every algorithm
  roundelay demo                                     four ranks on this host, checked
  roundelay run -n 4 train.py                        your script on four ranks
  roundelay bench all_reduce -n 2 --against gloo     how fast, beside others
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
        if cmd_name in self.list_commands(ctx):
            return COMMANDS.load(cmd_name)
        return None

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

    def invoke(self, ctx: click.Context) -> Any:  # whatever a command returns
        """Run the command; wrong use exits with 2, failed work with 1, Ctrl-C with 130."""
        try:
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
    from roundelay import __version__, _core  # noqa: PLC0415 - only here is it needed

    sets = " ".join(_core.instruction_sets())
    click.echo(f"roundelay {__version__} (native core: {_core.compiler()}, {sets})")
    ctx.exit()


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
    """Look at collective algorithms: listed, priced, drawn step by step, and proved."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
