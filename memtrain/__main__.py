"""The command `memtrain`: runs a command, and turns errors into messages and an exit code."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec

from memtrain.errors import EXIT_OUR_FAULT, OR, LaunchError, MemtrainError, printable

OF_A_NAME = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "the link leads to itself: give another name",
    errno.EACCES: "check the permissions of the file and of the folders above it",
    errno.EROFS: "give a folder that can be written",
}
"""Faults of the system that are of a name which was given, with the way out."""

NEEDS = {
    **{name: name for name in ("torch", "transformers", "accelerate", "datasets", "peft", "pydantic")},
    **{name: name for name in ("omegaconf", "typer", "rich", "safetensors", "tokenizers", "jinja2")},
    **{name: name for name in ("numpy", "psutil", "pyarrow", "xxhash")},
    "yaml": "pyyaml",
}
"""Packages without which memtrain does not run, by the name that they are imported by."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it (128 + SIGINT)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` when nothing is given); the exit code.

    What the user can mend is printed as `error: what / at / try` on stderr. Everything else is ours: a line
    that says so, and the traceback.
    """
    from memtrain.trainers.runtime.streams import flush, out_is_lost, take_streams

    if arguments is None:
        take_streams()
    try:
        from memtrain.cli.app import run

        code = run(arguments)
        flush()
        return code
    except MemtrainError as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        print(error.text(), file=sys.stderr)
        return error.exit_code
    except SystemExit as error:
        # Typer's end at a broken pipe.
        return 0 if out_is_lost() else int(error.code or 0)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if out_is_lost():
            if isinstance(error, BrokenPipeError):
                # The reader (`| head`) has left, with what it wanted.
                return 0
            said = f"the output cannot be written: {error.strerror}"
            fault = LaunchError(said, "stdout", "free some space, or write to another place")
            print(fault.text(), file=sys.stderr)
            return fault.exit_code
        from memtrain.trainers.runtime.atomic_files import FIXES

        known = FIXES | OF_A_NAME
        if error.errno not in known or isinstance(error, ConnectionError):
            return _our_fault()
        name = str(error.filename or "the disk")
        fault = LaunchError(f"{name} cannot be used: {error.strerror}", name, known[error.errno])
        print(fault.text(), file=sys.stderr)
        return fault.exit_code
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name not in NEEDS or find_spec(name) is not None:
            return _our_fault()
        fault = missing_packages()
        print(fault.text(), file=sys.stderr)
        return fault.exit_code
    except Exception:
        return _our_fault()


def missing_packages() -> LaunchError:
    """The packages of memtrain that this Python lacks, and the two ways to them; a tree is used without an
    installation where there is no network."""
    names = [package for module, package in NEEDS.items() if find_spec(module) is None]
    are = "is" if len(names) == 1 else "are"
    return LaunchError(
        f"{', '.join(names)} {are} not installed, and memtrain needs {'it' if len(names) == 1 else 'them'}",
        sys.executable,
        f"pip install {' '.join(names)}{OR}without a network: collect them with benchmarks/wheels.sh --all "
        "where there is one (docs/offline.md)",
    )


def _our_fault() -> int:
    """Report a bug of memtrain with the traceback of the handled error; the exit code."""
    print("this is a bug in memtrain, not in the recipe; please report the traceback below", file=sys.stderr)
    print(printable(traceback.format_exc()), file=sys.stderr, end="")
    return EXIT_OUR_FAULT


if __name__ == "__main__":
    sys.exit(main())
