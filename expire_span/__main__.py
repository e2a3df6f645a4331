"""The entry point of the installed command, of `python -m expire_span`, and of `accelerate launch -m expire_span` and torchrun.

Everything is imported inside `main`, so that Ctrl-C while modules are loading also ends with a sentence instead of a traceback.
"""

import os
import sys


def main() -> int:
    """Run the command line with this process's arguments."""
    # Without this, worker processes would look for modules in the current folder first and could run a file that lies there.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        from expire_span.train.launcher import follow_launcher

        follow_launcher()  # before torch is loaded: workers wait for each other right after that
        from expire_span.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("expire-span: stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:  # the command line itself needs the extra `train`
        from expire_span.errors import explain

        told = explain(error)
        if told is None:
            raise
        print(f"expire-span: {told[0]}", file=sys.stderr)
        return told[1]


if __name__ == "__main__":
    sys.exit(main())
