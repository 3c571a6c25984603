"""Layer 9: the command line. One file per command; adding a command is adding a file."""

__all__ = ["main"]


def main() -> None:
    """Run the command line; the entry point of `roundelay`."""
    # Importing the package stays cheap.
    from roundelay.cli._group import roundelay  # noqa: PLC0415
    from roundelay.cli._standard_output import open_standard_streams  # noqa: PLC0415

    open_standard_streams()
    roundelay(prog_name="roundelay")
