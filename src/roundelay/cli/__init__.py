"""Layer 9: the command line. One file per command; adding a command is adding a file."""

__all__ = ["main"]


def main() -> None:
    """Run the command line; the entry point of `roundelay`."""
    from roundelay.signals import do_the_work_of_init  # noqa: PLC0415 - importing stays cheap

    do_the_work_of_init()  # before anything else: until then signals are lost
    from roundelay.cli._group import roundelay  # noqa: PLC0415
    from roundelay.cli._standard_output import open_standard_streams  # noqa: PLC0415

    open_standard_streams()
    roundelay(prog_name="roundelay")
