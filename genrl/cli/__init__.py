"""The command line: `genrl` and `python -m genrl`."""

import os


def main() -> None:
    """Run the command that `sys.argv` names (`genrl.cli.app`)."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else it reads the metadata of all packages
    from genrl.cli.app import main as run

    run()
