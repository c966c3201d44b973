"""What the house's own tests share: where things are, and running a command."""

import pathlib
import subprocess
import sys
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else SOURCE / "build/release"


def run(*command, **options):
    """The command's output; a failure shows everything it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(words)}\nexit status {done.returncode}\n{done.stdout}")
    return done.stdout


def files(*patterns):
    """The tree's files that match, without what was built."""
    found = {path for pattern in patterns for path in SOURCE.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.relative_to(SOURCE).parts[0] not in ("build", ".git"))


def cached(name):
    """A variable of the build's CMake cache."""
    for line in (BUILD / "CMakeCache.txt").read_text().splitlines():
        if line.startswith(name + ":"):
            return line.split("=", 1)[1]
    raise KeyError(name)


def shown(path):
    return str(path.relative_to(SOURCE))


main = unittest.main
TestCase = unittest.TestCase
