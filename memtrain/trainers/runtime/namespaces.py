"""The namespace of process numbers: containers may share files and see none of each other's processes."""

from __future__ import annotations

import os
import re


def pid_namespace() -> str:
    """Number of the namespace of this process's number; 0 where the system does not tell.

    Source: namespaces(7): two processes are in one namespace where the numbers of the link are equal.
    """
    try:
        found = re.search("[0-9]+", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return "0"
    return found[0] if found else "0"
