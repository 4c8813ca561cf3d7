"""The command line: `genrl` and `python -m genrl`."""


def main() -> None:
    """Run the command that `sys.argv` names (`genrl.cli.app`)."""
    from genrl.cli.app import main as run

    run()
