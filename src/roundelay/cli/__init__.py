"""Layer 9: the command line. One file per command; adding a command is adding a file."""

__all__ = ["main"]


def main() -> None:
    """Run the command line; the entry point of `roundelay`."""
    from roundelay.cli._group import roundelay  # noqa: PLC0415 - importing the package stays cheap

    roundelay(prog_name="roundelay")
